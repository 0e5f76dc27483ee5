"""The VAE for ComfyUI-WanVideoWrapper, called in every form that the nodes of that pack use.

The oracle is ComfyUI's network with the same weights and the statistics of its latent formats.
"""

import functools

import pytest
import torch

from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.builders import decoder_of, random_state_dict, refused
from fast_video_vae.tests.nodes.vae.pairs import fast_vae, latents, relative_error
from fast_video_vae.tests.nodes.wan_wrapper.wrapped import Oracle, video, wrapped
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

CPU = torch.device("cpu")
STATES = {16: random_state_dict(8), 48: random_wan22(8, 16)}  # by latent channels

# Widgets of the nodes: sizes in pixels, of 2026 divided by 8; and the least that those allow.
MARCH_2025 = {"tile_size": (272, 272), "tile_stride": (144, 128)}
SIZES = {"tile_size": (34, 34), "tile_stride": (18, 16)}
SMALLEST = {"tile_size": (5, 5), "tile_stride": (4, 4)}

# Two families, for properties that depend on the statistics or the compression.
both = pytest.mark.parametrize("channels", STATES)


@pytest.fixture(scope="module")
def vae_of(comfyui, tmp_path_factory):
    """Factory of a fast VAE, wrapped, by latent channels."""
    folder = tmp_path_factory.mktemp("vae")
    return functools.cache(lambda channels: wrapped(fast_vae(STATES[channels], folder)))


@pytest.fixture
def vae(vae_of):
    return vae_of(16)


@both
@pytest.mark.parametrize(
    ("frames", "tiled", "end_", "size"),
    [
        (1, False, True, (48, 64)),  # a single frame has no end
        (6, True, False, (51, 70)),  # frames and pixels at the edges that fill no latent
        (8, False, True, (48, 64)),  # two frames before the last fill no latent
    ],
)
def test_encode_equals_the_normalised_latents_of_comfyui(
    vae_of, channels, frames, tiled, end_, size
):
    vae, pixels = vae_of(channels), video(frames, *size)
    before, step = pixels.clone(), vae.upsampling_factor
    given = torch.cat([pixels, -pixels])  # videos of a batch are independent
    found = vae.encode(given, device=CPU, tiled=tiled, end_=end_)
    height, width = (side - side % step for side in size)
    for result, sign in zip(found, (1, -1), strict=True):
        expected = Oracle(STATES[channels]).encode(
            sign * pixels[..., :height, :width], end_ and frames > 1
        )
        assert relative_error(result[None], expected) <= 1e-5
    assert (found.dtype, found.device) == (torch.float32, CPU)
    assert torch.equal(given[:1], before)


@both
@pytest.mark.parametrize(
    ("count", "tiled", "end_"), [(1, False, True), (5, True, False), (2, False, True)]
)
def test_decode_equals_the_frames_of_comfyui(vae_of, channels, count, tiled, end_):
    vae, latent = vae_of(channels), latents(count, 3, 4, batch=2, channels=channels)
    before = latent.clone()
    found = vae.decode(latent, device=CPU, end_=end_, tiled=tiled)
    for result, each in zip(found, latent, strict=True):
        expected = Oracle(STATES[channels]).decode(each[None], end_ and count > 1)
        assert relative_error(result[None], expected.clamp(-1, 1) if tiled else expected) <= 1e-5
        assert result.permute(1, 2, 3, 0).is_contiguous()  # the IMAGE that callers create from it
    assert torch.equal(latent, before)
    found.clamp_(-1, 1).add_(1).div_(2)  # callers do this in place


def test_every_form_of_an_encode_call_gives_the_same(vae):
    pixels = video(9)
    (listed,), expected = pixels, vae.encode(pixels, CPU)
    for given, more in (
        ([listed], {}),  # both releases
        (pixels, {"tiled": True, **MARCH_2025}),
        ((listed,), {"end_": False, "tiled": True, "pbar": False}),
        (pixels, {"tiled": True, **SIZES}),
        (pixels, {"tiled": True, **SMALLEST}),
        (pixels, {"tiled": True, "tile_size": None, "tile_stride": None}),
    ):
        result = vae.encode(given, device="cpu", **more)
        assert torch.equal(result, expected)
        result *= 0.5  # nodes with a latent strength write into it


def test_every_form_of_a_decode_call_gives_the_same(vae):
    """The VAE of March 2025 clamps all frames; that of 2026 only those of a tiled decode."""
    latent = latents(3, 3, 4)
    frames = vae.decode(latent, CPU, end_=False)
    clamped = frames.clamp(-1, 1)
    assert not torch.equal(clamped, frames)
    for expected, more in (
        (frames, {"pbar": True}),
        (frames, {"end_": False, "tiled": False, **SIZES}),
        (frames, {"output_device": "cpu"}),
        (frames, {"output_dtype": torch.float32}),
        (clamped, {}),
        (clamped, {"tiled": False, **MARCH_2025}),
        (clamped, {"tiled": True, "pbar": False}),
        (clamped, {"end_": False, "tiled": True, **SMALLEST}),
    ):
        for given in (latent, list(latent)):
            assert torch.equal(vae.decode(given, device="cpu", **more), expected)
    positional = (34, 34), (18, 16), False
    assert torch.equal(vae.decode(latent, CPU, False, False, *positional), frames)


@both
def test_a_sample_has_the_spread_of_the_posterior(vae_of, channels):
    vae, pixels = vae_of(channels), video(9)
    pixels[:, :, 1:] = 0  # static frames draw their own noise too
    mean = vae.encode(pixels, CPU)
    for given in (pixels, pixels[:, :, :1]):
        torch.manual_seed(1)
        sampled = vae.encode([given[0]], CPU, tiled=False, sample=True)
        posterior = diffusers_vae(STATES[channels]).module.encode(given).latent_dist
        spread = (posterior.logvar.clamp(-30, 20) / 2).exp()
        noise = (sampled - mean[:, :, : sampled.shape[2]]) / spread
        if noise.shape[2] > 1:
            assert not torch.equal(noise[:, :, -1], noise[:, :, -2])
    torch.manual_seed(1)
    assert relative_error(noise, torch.randn(noise.shape)) <= 1e-4
    assert torch.equal(vae.encode(pixels, CPU), mean)


@both
def test_members_and_outputs_have_the_requested_device_and_dtype(channels, tmp_path):
    vae = wrapped(fast_vae(STATES[channels], tmp_path))
    assert type(vae).__name__ != "TAEHV"  # the wrapper calls a VAE of this name differently
    assert (vae.dtype, vae.upsampling_factor) == (torch.float32, {16: 8, 48: 16}[channels])
    assert vae.model.clear_cache() is None
    assert vae.to(torch.bfloat16).dtype == torch.bfloat16
    latent = latents(2, 3, 4, channels=channels).bfloat16()
    for place, more, dtype, device in (
        ("cpu", {"pbar": False}, torch.bfloat16, "cpu"),
        ("cpu", {"output_dtype": torch.float16}, torch.float16, "cpu"),
        ("meta", {}, torch.float32, "meta"),
        ("meta", {"tiled": True, "pbar": False}, torch.float32, "cpu"),
        ("meta", {"output_device": "cpu"}, torch.bfloat16, "cpu"),
    ):
        frames = vae.decode(latent, place, **more)
        assert (frames.dtype, frames.device.type) == (dtype, device)
    # WANVAE of March 2025 scales the frames in their dtype; bf16 has three digits.
    assert vae.decode(latent, CPU).abs().max() == 1
    assert vae.encode(video(5).bfloat16(), "meta").device.type == "meta"
    assert vae.to(device=CPU, dtype=torch.float32).dtype == torch.float32
    with refused("^dtype is torch.float8_e4m3fn; expected one of torch\\."):
        vae.to(CPU, torch.float8_e4m3fn)


def test_moving_to_another_device_unloads_through_comfyui(fast, stock):
    from comfy.model_management import current_loaded_models

    def loaded():
        models = [each.model for each in current_loaded_models]
        return [vae.patcher in models for vae in (fast, stock)]

    vae, latent = wrapped(fast), latents(2, 3, 4)
    stock.decode(latent)
    before = vae.decode(latent, CPU)
    assert vae.to(CPU) is vae  # the device of the work: the weights may stay loaded
    assert loaded() == [True, True]
    for leave in (vae.to, vae.model.to):
        leave("meta")  # another kind of device, as the host is for a GPU
        assert loaded() == [False, True]
        assert torch.equal(vae.decode(latent, CPU), before)


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        ("encode", torch.zeros(3, 5, 48, 64), r"videos is \[3, 5, 48, 64\]; expected a tensor"),
        ("encode", {"samples": 1}, r"videos is a dict; expected a tensor \[B, C, T, H, W\] or a"),
        ("encode", [], "videos is empty; expected one video or more"),
        ("encode", [video(5)[0], video(9)[0]], r"videos\[1\] is \[3, 9, 48, 64\]; expected \[3, 5"),
        ("encode", torch.zeros(1, 4, 5, 48, 64), "frames has 4 channels; this VAE needs 3"),
        ("decode", torch.zeros(16, 2, 3, 4), r"hidden_states is \[16, 2, 3, 4\]; expected a ten"),
        ("decode", torch.zeros(1, 17, 2, 3, 4), "latent has 17 channels; this VAE needs"),
    ],
)
def test_invalid_videos_and_latents_are_a_one_line_error(vae, task, given, message):
    with refused(f"^{message}"):
        getattr(vae, task)(given, CPU)


def test_the_node_converts_every_wan_vae_and_refuses_others(stock, state, tmp_path):
    import comfy.sd
    from comfy.taesd.taehv import TAEHV

    from fast_video_vae.nodes.wan_wrapper.nodes import ToWanVideoWrapper

    def convert(vae, **choice):
        given = fast_vae(vae, tmp_path, **choice) if type(vae) is dict and vae else vae
        return ToWanVideoWrapper.execute(given).args[0]

    latent, kind = torch.zeros(1, 16, 2, 3, 4), type(stock)
    assert convert(stock).decode(latent, CPU).shape == (1, 3, 5, 24, 32)
    assert type(stock) is kind
    double = convert(random_state_dict(8, out_channels=12), dtype=torch.float16)
    assert (double.upsampling_factor, double.dtype) == (8, torch.float16)
    assert double.decode(latent.half(), CPU).shape == (1, 3, 5, 48, 64)
    decoder = convert(decoder_of(state))
    assert decoder.decode(latent, CPU).shape == (1, 3, 5, 24, 32)
    with refused("^the VAE has no encoder; only decoding works with it$"):
        decoder.encode(video(1), CPU)
    rgba = random_state_dict(8, image_channels=4, out_channels=4)
    for given, message in (
        (random_qwen21(), "qwen-image-2.1 with 64 latent channels and 4 image channels"),
        (rgba, "wan2.1 with 16 latent channels and 4 image channels; expected"),
        (comfy.sd.VAE(sd=TAEHV(16).state_dict()), "a VAE with TAEHV, which cannot be "),
        ({}, "a dict with nothing in it; expected a VAE$"),
    ):
        with refused(f"^vae: got {message}"):
            convert(given)


def test_frames_fall_back_to_the_host(vae, fast, monkeypatch):
    import comfy.model_management as management

    kind, failures, latent = type(fast.first_stage_model), [], latents(2, 3, 4)
    real, expected = kind.decode_stream, vae.decode(latent, CPU)

    def stream(self, *arguments, **options):
        if options["out"].device.type == "meta":
            failures.append(1)
            raise management.OOM_EXCEPTION("no memory")
        return real(self, *arguments, **options)

    monkeypatch.setattr(kind, "decode_stream", stream)
    assert relative_error(vae.decode(latent, "meta"), expected) <= 1e-5
    assert failures
