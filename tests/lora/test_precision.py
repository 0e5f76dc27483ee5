"""How much of a small delta survives in 16-bit weights, and what `auto` does about it."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Target, Targets
from fast_video_vae.lora.precision import LEAST_KEPT, kept, sample_of
from fast_video_vae.tests.lora.models import PREFIX
from fast_video_vae.tests.lora.nets import CPU, session_of

INNER, OUT, TOKENS = 256, 64, 4096
HALVES = (torch.bfloat16, torch.float16)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def survival(weight, delta, dtype):
    """Return the share of the delta in the rounded sum, in float64."""
    delta = delta.double()
    added = (weight + delta).to(dtype).double() - weight.double()
    return float((added * delta).sum() / delta.square().sum())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [0.1, 0.01, 0.003, 0.001, 0.0003])
@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_the_share_is_that_of_rounded_sums(dtype, size, scale):
    """For deltas of normally distributed numbers, and of pairs."""
    weight = (scale * normal(512, 512)).to(dtype)
    rms = size * weight.float().square().mean().sqrt().item()
    pair = normal(512, 16, seed=1) @ normal(16, 512, seed=2) / 4
    for delta in (normal(512, 512, seed=3), pair):
        expected = survival(weight, rms * delta, dtype)
        for sample in (weight.flatten().float(), sample_of(weight)):
            assert kept(sample, rms, dtype) == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize(
    ("dtype", "rms"), [(torch.float32, 1e-9), (torch.float64, 1e-9), (torch.bfloat16, 0.0)]
)
def test_all_of_a_delta_survives_in_wide_dtypes_and_nothing_is_lost_of_none(dtype, rms):
    assert kept(normal(64), rms, dtype) == 1.0
    assert kept(torch.zeros(64), 1e-6, torch.bfloat16) == 1.0


@pytest.mark.parametrize("shape", [(5120, 512), (1024, 3072), (1536, 1536), (64, 64)])
def test_a_sample_has_all_inputs_of_a_layer(shape):
    """A model can have inputs whose weights are smaller than all others."""
    columns = torch.arange(shape[1]).expand(shape).float()
    found = sample_of(columns.contiguous())
    quarters = (found / shape[1] * 4).long().bincount(minlength=4)
    assert quarters.min() > len(found) / 16


class Scaled(torch.Tensor):
    """A weight with the attributes of ComfyUI's QuantizedTensor."""

    @staticmethod
    def of(weight, scale):
        found = torch.Tensor._make_subclass(Scaled, weight)
        found._qdata = (weight / scale).round().to(torch.int8)
        found._params = SimpleNamespace(scale=scale)
        return found


@pytest.mark.parametrize("scale", [torch.tensor(0.1), torch.arange(1, 301).float()[:, None] / 999])
def test_a_sample_of_a_scaled_weight_has_its_values(scale):
    weight = (127 * scale * torch.ones(300, 200)).round(decimals=4)
    found = sample_of(Scaled.of(weight, scale))
    torch.testing.assert_close(found.max(), weight.max(), rtol=0.1, atol=0)
    torch.testing.assert_close(found.mean(), weight.mean(), rtol=0.1, atol=0)


def test_a_sample_is_the_same_for_views_and_absent_for_packed_weights():
    weight = normal(300, 200)
    assert torch.equal(sample_of(weight), sample_of(weight.clone()))
    assert sample_of(weight).numel() <= 17 * 64
    assert torch.equal(sample_of(weight.T), sample_of(weight.T.contiguous()))
    small = weight.to(torch.float8_e4m3fn)
    assert torch.equal(sample_of(small), sample_of(small.float()))
    assert sample_of(weight.to(torch.int8)) is None
    assert sample_of(weight.to("meta")) is None


# One layer of a model in bfloat16.


def layer_with(folder, size, dtype=torch.bfloat16, mode="auto", strength=1.0):
    """Return a model, its layer, a session with a delta of `size` of the weight, and the delta."""
    layer = nn.Linear(INNER, OUT, bias=False).to(dtype).requires_grad_(False)
    layer.weight.copy_(normal(OUT, INNER) / 16)
    up, down = normal(OUT, 8, seed=1).to(dtype), normal(8, INNER, seed=2).to(dtype)
    amount = size / 16 / 8**0.5
    model = nn.Module()
    model.diffusion_model = nn.Module()
    model.diffusion_model.q = layer
    path = folder / f"{size}.safetensors"
    tensors = {"lora_up": up, "lora_down": down, "alpha": torch.tensor(8 * amount)}
    names = {"lora_up": "lora_up.weight", "lora_down": "lora_down.weight", "alpha": "alpha"}
    save_file({f"{PREFIX}q.{names[key]}": value for key, value in tensors.items()}, path)
    bank = load_bank([path], Targets({f"{PREFIX}q.weight": (OUT, INNER)}), dtype)
    delta = amount * strength * up.double() @ down.double()
    return model, layer, session_of(bank, [strength], mode), delta


def effect(model, layer, session, delta):
    """Return the share of the delta in what the layer adds, and whether its weight changed.

    The weight has almost no effect on the inputs, so the rounding of the output matters little.
    """
    x = normal(TOKENS, INNER, seed=5)
    weight = layer.weight.float()
    x = (x - x @ torch.linalg.pinv(weight) @ weight).bfloat16()
    added = session.counts.stream
    with session.call(model, CPU):
        result = layer(x).double()
    expected = x.double() @ delta.T
    share = ((result - layer(x).double()) * expected).sum() / expected.square().sum()
    return float(share), session.counts.stream > added


@pytest.mark.parametrize("size", [0.1, 0.01, 0.003, 0.001, 0.0003])
def test_auto_keeps_the_effect_of_weak_loras(tmp_path, size):
    share, streamed = effect(*layer_with(tmp_path, size))
    assert share == pytest.approx(1.0, abs=1 - LEAST_KEPT + 0.01)
    assert streamed is (size >= 0.01)


def test_stream_loses_what_the_estimate_says(tmp_path):
    model, layer, session, delta = layer_with(tmp_path, 0.001, mode="stream")
    share, _ = effect(model, layer, session, delta)
    rms = session.bank.rms(next(iter(session.bank.layers.values())), {0: 1.0})
    assert share == pytest.approx(kept(sample_of(layer.weight), rms, torch.bfloat16), abs=0.1)
    assert share < 0.6


def test_the_strength_decides_and_not_the_file(tmp_path):
    model, layer, session, _ = layer_with(tmp_path, 0.001)
    x = normal(TOKENS, INNER).bfloat16()
    ways = []
    for strength in (1.0, 30.0, 1.0, -30.0):
        session.amounts.set([strength])
        session.counts.clear()
        with session.call(model, CPU):
            layer(x)
        ways.append((session.counts.stream, session.counts.bypass))
    assert ways == [(0, 1), (1, 0)] * 2


def test_float32_weights_are_streamed_whatever_the_delta(tmp_path):
    model, layer, session, _ = layer_with(tmp_path, 0.0003, torch.float32)
    with session.call(model, CPU):
        layer(normal(TOKENS, INNER))
    assert (session.counts.stream, session.counts.bypass) == (1, 0)


@pytest.mark.parametrize("strengths", [(1.0, 0.0), (0.5, -2.0), (1.0, 1.0), (0.0, 0.0)])
def test_the_size_of_a_delta_is_estimated(stack_of_two, strengths):
    """Of several files together, which may add up or cancel; the same in every process."""
    bank, deltas = stack_of_two
    layer = bank.layers[Target(f"{PREFIX}q.weight")]
    total = sum(strength * delta for strength, delta in zip(strengths, deltas, strict=True))
    expected = total.square().mean().sqrt().item()
    estimate = bank.rms(layer, dict(enumerate(strengths)))
    assert estimate == pytest.approx(expected, rel=0.35)
    assert bank.copy().rms(layer, dict(enumerate(strengths))) == estimate


@pytest.fixture
def stack_of_two(tmp_path):
    """Return a bank of two files, and their deltas; the second one partly cancels the first."""
    paths, deltas, up, down = [], [], normal(96, 8), normal(8, 64)
    for number, alpha in enumerate((8.0, 2.0)):
        down = down + number * normal(8, 64, seed=9)
        tensors = {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(alpha)}
        path = tmp_path / f"{number}.safetensors"
        save_file({f"{PREFIX}q.{name}": value for name, value in tensors.items()}, path)
        paths.append(path)
        deltas.append(alpha / 8 * up.double() @ down.double())
    return load_bank(paths, Targets({f"{PREFIX}q.weight": (96, 64)})), deltas
