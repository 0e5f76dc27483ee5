"""Each family next to ComfyUI, in its published widths, in half precision, and its own properties.

`test_any_way.py` compares all families with another implementation.
"""

import inspect

import pytest
import torch

from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.families import (
    Convolutions,
    joined,
    random_frames,
    random_latent,
    relative_error,
    stock,
)
from fast_video_vae.tests.vae.models.seedvr2_oracle import Oracle
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.planning import plan

SIZE = 2, 1  # of a latent


def peer_of(family, state, dtype):
    if family == "seedvr2":
        return Oracle({name: value.to(dtype) for name, value in state.items()})
    return diffusers_vae(state, dtype=dtype)


FAMILIES = {
    "wan2.1": lambda: random_state_dict(8),
    "wan2.2": lambda: random_wan22(8, 16),
    "seedvr2": lambda: random_seedvr2((32, 32, 64, 64)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """The name of a family, and a small VAE of it."""
    return request.param, load_vae(FAMILIES[request.param](), dtype=torch.float32)


def given(vae, latents=2, batch=1):
    """Frames and a latent."""
    size = (vae.config.spatial_compression * length for length in SIZE)
    frames = random_frames(batch, 3, 4 * latents - 3, *size)
    return frames, random_latent(batch, vae.config.latent_channels, latents, *SIZE)


@pytest.mark.slow
def test_the_published_widths_equal_diffusers():
    state = random_state_dict(96)
    vae, peer = load_vae(state, dtype=torch.float32), diffusers_vae(state)
    video = random_frames(1, 3, 5, 16, 24)
    expected = peer.encode(video)
    assert relative_error(vae.encode(video), expected) <= 1e-5
    # diffusers clamps what it decodes
    actual = vae.decode(expected)
    assert relative_error(actual.clamp(-1, 1), peer.decode(expected).clamp(-1, 1)) <= 1e-5


@pytest.mark.parametrize(
    ("name", "state"),
    [("AutoencoderKLWan", random_state_dict), ("AutoencoderKLQwenImage21", random_qwen21)],
)
def test_the_statistics_are_those_of_diffusers(name, state):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    defaults = inspect.signature(getattr(diffusers, name).__init__).parameters
    config = load_vae(state(8)).config
    assert config.latent_mean == tuple(defaults["latents_mean"].default)
    assert config.latent_std == tuple(defaults["latents_std"].default)


def test_decode_does_not_clamp():
    state = random_state_dict(8)
    brighter = state | {"decoder.head.2.bias": state["decoder.head.2.bias"] + 3}
    assert load_vae(brighter).decode(random_latent(1, 16, 1, 2, 2)).max() > 2


@pytest.mark.comfyui
@pytest.mark.parametrize("alpha", [False, True])
def test_results_and_statistics_equal_comfyui(alpha):
    channels = {"image_channels": 4, "out_channels": 4} if alpha else {}
    state = random_state_dict(8, **channels) if alpha else random_wan22(8, 16)
    peer, vae = stock(state), load_vae(state, dtype=torch.float32)
    from comfy.latent_formats import Wan21, Wan22

    latent_format = Wan21() if alpha else Wan22()
    for frames in (1, 9):
        video = random_frames(1, vae.config.image_channels, frames, 32, 16)
        expected = peer.encode(video)
        assert relative_error(vae.encode(video), expected) <= 1e-5
        # neither result is clamped
        assert relative_error(vae.decode(expected), peer.decode(expected)) <= 1e-5
        torch.testing.assert_close(vae.normalize(expected), latent_format.process_in(expected))
        torch.testing.assert_close(vae.denormalize(expected), latent_format.process_out(expected))


def test_a_single_frame_runs_in_2d_and_equals_the_first_of_a_video(family):
    vae = family[1]
    for run, x in zip((vae.encode, vae.decode), given(vae), strict=True):
        expected = run(x)[:, :, :1]
        with Convolutions() as convolutions:
            assert torch.equal(run(x[:, :, :1]), expected)
        assert set(convolutions.dimensions) == {4}


def test_all_activations_are_channels_last(family):
    vae, seen = family[1], []

    def note(module, args, output):
        seen.extend(x for x in (*args, output) if isinstance(x, torch.Tensor) and x.ndim == 5)

    hooks = [module.register_forward_hook(note) for module in vae.modules()]
    for latents, batch in ((1, 2), (2, 1)):
        seen.append(vae.decode(vae.encode(given(vae, latents, batch)[0])))
    for hook in hooks:
        hook.remove()
    assert len(seen) > 50
    assert all(x.is_contiguous(memory_format=torch.channels_last_3d) for x in seen)


def test_low_precision_errs_at_most_twice_as_much_as_the_peer(family):
    (name, whole), dtype = family, torch.bfloat16
    state, (frames, latent) = whole.state_dict(), given(whole)
    vae = load_vae(state, dtype=dtype)
    peer, exact = (peer_of(name, state, each) for each in (dtype, torch.float64))
    encoded, decoded = exact.encode(frames.double()), exact.decode(latent.double())
    runs = (vae.encode, peer.encode, frames, encoded), (vae.decode, peer.decode, latent, decoded)
    for run, other, x, expected in runs:
        ours, theirs, expected = (
            y.double() if run == vae.encode else y.double().clamp(-1, 1)
            for y in (run(x), other(x.to(dtype)), expected)
        )
        assert (ours - expected).norm() <= 2 * (theirs - expected).norm()


def test_latents_of_seedvr2_are_scaled_and_have_no_statistics():
    vae = load_vae(random_seedvr2((32, 32, 64, 64)), dtype=torch.float32)
    assert vae.config.latent_scale == 0.9152
    latent = random_latent(1, 16, 1, 2, 2)
    assert torch.equal(vae.normalize(latent), latent)
    assert torch.equal(vae.denormalize(latent), latent)
    frames = random_frames(1, 3, 5, 16, 16)
    mean = joined(vae.encode_stream(frames, scaled=False))
    assert torch.equal(mean * 0.9152, vae.encode(frames))


def test_changed_parameters_update_the_folded_weights_of_seedvr2():
    """Also through `.data`, which autograd does not record."""
    state = random_seedvr2((32, 32, 32, 32))
    vae, latent = load_vae(state, dtype=torch.float32), random_latent(1, 16, 2, 1, 2)
    vae.decode(latent)
    for name in ("upscale_conv.weight", "upscale_conv.bias", "conv.weight"):
        vae.get_parameter(f"decoder.up_blocks.1.upsamplers.0.{name}").data.mul_(-2)
        changed = load_vae(vae.state_dict(), dtype=torch.float32)
        assert torch.equal(vae.decode(latent), changed.decode(latent))


@pytest.mark.usefixtures("plans_anew")
def test_a_convolution_of_seedvr2_reads_one_band_at_a_time_where_memory_is_short(monkeypatch):
    """A convolution reads the size of a band, not of three frames."""
    vae = load_vae(random_seedvr2((32, 32, 32, 32)), dtype=torch.float32)
    latent = random_latent(1, 16, 2, 4, 2)
    read = []
    monkeypatch.setattr(plan, "_SMALL_PARTS", (1,))
    for limit in (1 << 30, 1):
        vae.limit_bytes = limit
        with Convolutions() as convolutions:
            vae.decode(latent)
        read.append((convolutions.largest, convolutions.count))
    assert read[1][0] * 4 < read[0][0]
    assert read[1][1] > 4 * read[0][1]
