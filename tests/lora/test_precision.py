"""How much of a small delta survives in 16-bit weights, and what `auto` does about it."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Target, Targets
from fast_video_vae.lora.precision import kept, sample_of
from fast_video_vae.tests.lora.models import PREFIX, spelled
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


def test_a_sample_is_the_same_for_views_and_absent_for_packed_weights():
    weight = normal(300, 200)
    assert torch.equal(sample_of(weight), sample_of(weight.clone()))
    assert sample_of(weight).numel() <= 17 * 64
    assert torch.equal(sample_of(weight.T), sample_of(weight.T.contiguous()))
    small = weight.to(torch.float8_e4m3fn)
    assert torch.equal(sample_of(small), sample_of(small.float()))
    assert sample_of(weight.to(torch.int8)) is None
    assert sample_of(weight.to("meta")) is None


class Scaled(torch.Tensor):
    """A weight with the attributes of ComfyUI's QuantizedTensor."""


@pytest.mark.parametrize("scale", [torch.tensor(0.1), torch.arange(1, 301).float()[:, None] / 999])
def test_a_sample_of_a_scaled_weight_has_its_values(scale):
    weight = (127 * scale * torch.ones(300, 200)).round(decimals=4)
    scaled = weight.clone().as_subclass(Scaled)
    scaled._qdata = (weight / scale).round().to(torch.int8)
    scaled._params = SimpleNamespace(scale=scale)
    found = sample_of(scaled)
    torch.testing.assert_close(found.max(), weight.max(), rtol=0.1, atol=0)
    torch.testing.assert_close(found.mean(), weight.mean(), rtol=0.1, atol=0)


def layer_with(folder, size, dtype):
    """Return a model, its layer, and a session with a delta of `size` of the weight."""
    layer = nn.Linear(INNER, OUT, bias=False).to(dtype).requires_grad_(False)
    layer.weight.copy_(normal(OUT, INNER) / 16)
    up, down = normal(OUT, 8, seed=1).to(dtype), normal(8, INNER, seed=2).to(dtype)
    amount = size / 16 / 8**0.5
    model = nn.Module()
    model.diffusion_model = nn.Module()
    model.diffusion_model.q = layer
    path = folder / f"{size}.safetensors"
    save_file(spelled({"q": (up, down)}, alpha=8 * amount), path)
    bank = load_bank([path], Targets({f"{PREFIX}q.weight": (OUT, INNER)}), dtype)
    return model, layer, session_of(bank, [1.0])


@pytest.mark.parametrize(
    ("dtype", "size", "strengths"),
    [
        (torch.bfloat16, 0.01, {1.0: "stream", 0.1: "bypass", -0.1: "bypass"}),
        (torch.bfloat16, 0.001, {1.0: "bypass", 30.0: "stream", -30.0: "stream"}),
        (torch.float32, 0.0003, {1.0: "stream"}),  # whatever the delta
    ],
)
def test_auto_streams_what_the_weights_can_keep(tmp_path, dtype, size, strengths):
    """The strength of the run decides, and not the file."""
    model, layer, session = layer_with(tmp_path, size, dtype)
    x = normal(TOKENS, INNER).to(dtype)
    for strength, way in [*strengths.items(), *strengths.items()]:
        session.amounts.set([strength])
        session.counts.clear()
        with session.call(model, CPU):
            layer(x)
        assert (session.counts.stream, session.counts.bypass) == (way == "stream", way == "bypass")


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
        paths.append(tmp_path / f"{number}.safetensors")
        save_file(spelled({"q": (up, down)}, alpha=alpha), paths[-1])
        deltas.append(alpha / 8 * up.double() @ down.double())
    return load_bank(paths, Targets({f"{PREFIX}q.weight": (96, 64)})), deltas
