"""Derived weights: derived once, updated with their parameter, usable in any mode of PyTorch.

What a candidate fuses is used too: tail, sums, norm.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.kernels.convolution import aten, onednn
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import STATES, close, latent_for
from fast_video_vae.tests.vae.layers.candidate import CHOICES, serve
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.layers import causal_conv as causal
from fast_video_vae.vae.layers import conv, conv_weights
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.models.wan_blocks import ResidualBlock, RMSNorm


@pytest.fixture
def vae():
    return load_vae(random_state_dict(8), dtype=torch.float32)


@pytest.fixture
def latent():
    return torch.randn(1, 16, 3, 2, 2, generator=torch.Generator().manual_seed(0))


KEY = "decoder.upsamples.8.residual.2.weight"


def scale(vae, weight, module):
    with torch.inference_mode():
        weight.mul_(1.5)


def replace(vae, weight, module):
    module.weight = torch.nn.Parameter(weight.detach() * 1.5, requires_grad=False)


def load(vae, weight, module):
    vae.load_state_dict({**vae.state_dict(), KEY: weight.detach() * 1.5})


# All ways to change a weight.
WAYS = {
    "load_state_dict": load,
    "in place": scale,
    "one element through .data": lambda vae, weight, module: weight.data[0, 0, 2, 1, 1].add_(5),
    "replaced": replace,
}


def change(vae, how):
    WAYS[how](vae, vae.get_parameter(KEY), vae.get_submodule(KEY.removesuffix(".weight")))


@pytest.mark.parametrize("how", WAYS)
def test_a_changed_weight_changes_the_frames(vae, latent, how):
    before = vae.decode(latent)
    original = {key: value.clone() for key, value in vae.state_dict().items()}
    change(vae, how)
    expected = load_vae(vae.state_dict(), dtype=torch.float32).decode(latent)
    assert not torch.equal(expected, before)
    assert torch.equal(vae.decode(latent), expected)
    vae.load_state_dict(original, assign=True)
    assert torch.equal(vae.decode(latent), before)


def test_a_gpu_notices_stale_weights_with_one_call_for_all(vae, latent, monkeypatch):
    norms, calls = torch._foreach_norm, []
    monkeypatch.setattr(conv_weights, "sums_float64", lambda _: True)
    monkeypatch.setattr(
        torch, "_foreach_norm", lambda x, **options: calls.append(len(x)) or norms(x, **options)
    )
    before = vae.decode(latent)
    calls.clear()
    assert torch.equal(vae.decode(latent), before)
    (count,) = calls
    assert count > 10
    change(vae, "one element through .data")
    expected = load_vae(vae.state_dict(), dtype=torch.float32).decode(latent)
    assert torch.equal(vae.decode(latent), expected)


def test_a_folded_convolution_follows_each_of_its_weights(latent):
    vae = load_vae(STATES["seedvr2"](), dtype=torch.float32)
    before = vae.decode(latent)
    name = next(each for each, _ in vae.named_parameters() if each.endswith("upscale_conv.bias"))
    vae.get_parameter(name).data.add_(1)  # one of four that it is derived from
    expected = load_vae(vae.state_dict(), dtype=torch.float32).decode(latent)
    assert not torch.equal(expected, before)
    assert torch.equal(vae.decode(latent), expected)


def test_weights_are_derived_once_and_not_copied_in_the_right_layout(vae, latent, monkeypatch):
    monkeypatch.setattr(onednn, "serves", lambda *_: False)  # as on a GPU
    own, derive, calls = sum(each.nbytes for each in vae.parameters()), conv.Conv._derive, []
    monkeypatch.setattr(conv.Conv, "_derive", lambda *a: calls.append(a[1:]) or derive(*a))
    assert vae.weight_bytes() == own
    vae.decode(latent)
    first = len(calls)
    vae.decode(torch.randn(1, 16, 5, 2, 4))
    assert first == len(calls) > 0
    planes = [c for c in vae.decoder.modules() if isinstance(c, causal.CausalConv3d) and c.padding]
    # Only the last tap of 3D weights, for the first frame, and the folded upsampling weights.
    taps = sum(c.weight.nbytes // 3 for c in planes)
    folds = [c for c in vae.decoder.modules() if isinstance(c, causal.UpsampleConv2d)]
    assert vae.weight_bytes() == own + taps + sum(c.weight.nbytes * 16 // 9 for c in folds)
    vae.to(torch.bfloat16)
    assert vae.weight_bytes() == own // 2
    assert vae.dtype == vae.encode_dtype == vae.decode(latent).dtype == torch.bfloat16


@pytest.mark.parametrize("made_in", [True, False])
def test_tensors_of_inference_mode_work_outside_of_it(latent, made_in):
    with torch.inference_mode(made_in):
        vae = load_vae(random_state_dict(8), dtype=torch.float32)
        given = latent.clone()
        expected = vae.decode(given)
        encoded = vae.encode(expected)
    with torch.inference_mode(not made_in):
        for each in (given, latent.clone()):
            assert torch.equal(vae.decode(each), expected)
        assert torch.equal(vae.encode(expected), encoded)
    assert not expected.is_inference()


def test_autocast_does_not_affect_the_vae(vae, latent):
    expected = vae.decode(latent)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(vae.decode(latent), expected)


def test_a_copy_has_its_own_weights(vae, latent):
    before = vae.decode(latent)
    other = copy.deepcopy(vae)
    change(other, "in place")
    assert torch.equal(vae.decode(latent), before)
    assert not torch.equal(other.decode(latent), before)


def test_derived_large_weights_are_not_kept(vae, latent, monkeypatch):
    video = torch.rand(1, 3, 5, 16, 16) * 2 - 1
    expected = vae.decode(latent), vae.encode(video)
    vae.drop_derived()
    monkeypatch.setattr(conv_weights, "_KEPT_ELEMENTS", 0)
    torch.testing.assert_close(vae.decode(latent), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vae.encode(video), expected[1], rtol=1e-5, atol=1e-5)
    kinds = {form.kind for each in vae.modules() for form in getattr(each, "forms", {})}
    assert kinds == {"folded"}


@pytest.mark.parametrize(
    ("into", "out", "dtype", "replicate"),
    [(3, 96, torch.bfloat16, False), (4, 5, torch.float16, True)],
)
def test_filled_up_channels_give_the_same_convolution(into, out, dtype, replicate, monkeypatch):
    """The products are those of a convolution in float32 of the same numbers, rounded once."""
    monkeypatch.setattr(aten, "_ALIGNED", ("cpu",))
    monkeypatch.setattr(onednn, "serves", lambda *_: False)
    generator = torch.Generator().manual_seed(0)
    layer = causal.CausalConv3d(into, out, replicate=replicate).requires_grad_(False).to(dtype)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    # Whole numbers, whose sums are exact in float32 in any order.
    layer.weight.copy_(layer.weight.sign())
    x = torch.randint(-4, 5, (1, 5, 6, 7, into), generator=generator).to(dtype).movedim(-1, 1)
    cache = TemporalCache()
    results = []
    with torch.no_grad():
        for run in (x[:, :, :1], x[:, :, 1:4], x[:, :, 4:]):
            results.append(layer(run.contiguous(memory_format=torch.channels_last_3d), cache))
            cache.first = False
    before = x[:, :, :1].repeat(1, 1, 2, 1, 1) if replicate else torch.zeros_like(x[:, :, :2])
    padded = F.pad(torch.cat([before, x], dim=2).float(), (1, 1, 1, 1))
    exact = F.conv3d(padded, layer.weight.float()).to(dtype).float()
    expected = (exact + layer.bias.float().view(-1, 1, 1, 1)).to(dtype)
    result = torch.cat(results, dim=2)
    assert torch.equal(result, expected)
    assert result.is_contiguous(memory_format=torch.channels_last_3d)
    layouts = [layout for form in layer.forms.values() for layout in form.weight.layouts]
    assert {taps.shape[:2] for taps in layouts} == {(-(-out // 8) * 8, -(-into // 8) * 8)}


def test_a_pointwise_convolution_follows_its_input():
    """So that a video on another device can be entered through the weights of the VAE."""
    mix = conv.PointwiseConv(4, 6).requires_grad_(False)
    y = mix(torch.empty(1, 4, 2, 3, 5, device="meta", dtype=torch.bfloat16))
    assert (y.shape, y.dtype, y.device.type) == ((1, 6, 2, 3, 5), torch.bfloat16, "meta")


@pytest.fixture(scope="module")
def truth():
    """A narrow VAE, a latent, and its decode by the library."""
    vae = load_vae(STATES["wan2.1"](), dtype=torch.float32)
    latent = latent_for(vae, 3, 32, 48)
    return vae, latent, vae.decode(latent)


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_fused_is_used(truth, monkeypatch, choice):
    """With all of it a block runs one pass for its first norm, and none for its second."""
    vae, latent, decoded = truth
    calls, silu = [], RMSNorm.silu
    candidate = serve(monkeypatch, choice)
    monkeypatch.setattr(RMSNorm, "silu", lambda *a, **k: calls.append(a[0]) or silu(*a, **k))
    close(vae.decode(latent), decoded)
    assert bool(candidate.tails) == candidate.fused.tail
    assert bool(candidate.norms) == candidate.fused.norm
    blocks = [each for each in vae.decoder.modules() if isinstance(each, ResidualBlock)]
    assert {block.residual["0"] for block in blocks} <= set(calls)
    if choice == "all":
        assert not {block.residual["3"] for block in blocks} & set(calls)
