"""Weak LoRAs on 16-bit weights: which deltas rounding would lose, and what `auto` does then."""

from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.lora.precision import is_weak, rms_of, rms_of_pair, small_deltas


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_delta_is_weak_where_rounded_sums_lose_three_percent(dtype):
    weight = (0.02 * normal(512, 512)).to(dtype)
    size = rms_of(weight)
    for factor in (0.1, 0.25, 0.4, 0.6, 1.0, 4.0):
        rms = factor * torch.finfo(dtype).eps * size
        delta = rms * normal(512, 512, seed=3).double()
        added = (weight + delta).to(dtype).double() - weight.double()
        share = float((added * delta).sum() / delta.square().sum())
        assert is_weak(rms, size, dtype) == (share < 0.97)
    assert is_weak(1.0, None, dtype)  # packed weights
    assert not is_weak(0.0, size, dtype)
    assert not is_weak(1e-9, size, torch.float32)


class Scaled(torch.Tensor):
    """A weight with the attributes of ComfyUI's QuantizedTensor."""


def test_sizes_are_estimated_from_a_part():
    weight = normal(300, 200) * torch.linspace(0.1, 2, 200)  # other numbers for other inputs
    assert rms_of(weight) == pytest.approx(weight.square().mean().sqrt().item(), rel=0.1)
    assert rms_of(weight.to(torch.float8_e4m3fn)) == pytest.approx(rms_of(weight), rel=0.05)
    assert rms_of(weight.to(torch.int8)) is rms_of(weight.to("meta")) is None
    assert rms_of(weight.as_subclass(Scaled)) is None
    for scale in (torch.tensor(0.1), torch.arange(1, 301)[:, None] / 999):
        scaled = weight.as_subclass(Scaled)
        scaled._qdata = torch.full((300, 200), 100, dtype=torch.int8)
        scaled._params = SimpleNamespace(scale=scale)
        expected = 100 * scale.square().mean().sqrt().item()
        assert rms_of(scaled) == pytest.approx(expected, rel=1e-3)
    for rank in (1, 8):
        down, up = normal(rank, 700), normal(900, rank, seed=1)
        expected = (up @ down).square().mean().sqrt().item()
        assert rms_of_pair(down, up) == pytest.approx(expected, rel=0.2)


def test_one_line_says_what_is_lost():
    deltas = [(rms, 1.0, torch.bfloat16) for rms in (1e-2, 1e-3, 1e-4)]
    assert small_deltas(deltas[:1], "stream") == []
    assert small_deltas([(1e-9, None, deltas[0][2])], "stream") == []  # of a packed weight
    auto = "small deltas: bypass for 2 layers, which bfloat16 weights would lose"
    assert small_deltas(deltas, "auto") == [auto]
    for mode in ("stream", "merged"):
        lost = "small deltas: bfloat16 weights lose a part in 2 layers; bypass keeps all"
        assert small_deltas(deltas, mode) == [lost]
