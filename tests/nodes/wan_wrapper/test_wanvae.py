"""The VAE for ComfyUI-WanVideoWrapper, called in every form that the nodes of that pack use.

The oracle is ComfyUI's network with the same weights, run separately on each part of a video, with
the statistics of ComfyUI's latent formats.
"""

import functools

import pytest
import torch

from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.builders import decoder_of, random_state_dict, refused
from fast_video_vae.tests.nodes.vae.pairs import fast_vae, relative_error
from fast_video_vae.tests.nodes.wan_wrapper.wrapped import CPU, family_of, video, wrapped
from fast_video_vae.tests.wan22 import random_qwen21

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


# Widgets of the nodes: sizes in pixels, of 2026 divided by 8; and the least that those allow.
MARCH_2025 = {"tile_size": (272, 272), "tile_stride": (144, 128)}
SIZES = {"tile_size": (34, 34), "tile_stride": (18, 16)}
SMALLEST = {"tile_size": (40 // 8, 40 // 8), "tile_stride": (32 // 8, 32 // 8)}


@pytest.fixture(scope="module")
def families(comfyui, tmp_path_factory):
    """Factory of VAEs with narrow random weights."""
    return functools.cache(lambda name: family_of(name, tmp_path_factory.mktemp("vae")))


@pytest.fixture
def family(request, families):
    return families(getattr(request, "param", "wan2.1"))


# For properties that depend on the statistics or the compression of a family.
both = pytest.mark.parametrize("family", ["wan2.1", "wan2.2"], indirect=True)


@pytest.fixture
def vae(family):
    return wrapped(family.fast)


def latent_of(family, latents, batch=1):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, family.channels, latents, 3, 4, generator=generator)


@both
@pytest.mark.parametrize(
    ("frames", "tiled", "end_", "size"),
    [
        (1, False, True, (48, 64)),  # a single frame has no end
        (6, True, False, (51, 70)),  # frames and pixels at the edges that fill no latent
        (8, False, True, (48, 64)),  # two frames before the last fill no latent
    ],
)
def test_encode_equals_the_normalised_latents_of_comfyui(family, vae, frames, tiled, end_, size):
    """The end is a video of its own."""
    pixels = video(frames, *size)
    before, (height, width) = pixels.clone(), (side - side % family.factor for side in size)
    latents = vae.encode(pixels, device=CPU, tiled=tiled, end_=end_)
    expected = family.oracle.encode(pixels[..., :height, :width], end_=end_ and frames > 1)
    assert relative_error(latents, expected) <= 1e-5
    assert (latents.dtype, latents.device) == (torch.float32, CPU)
    assert torch.equal(pixels, before)


def test_every_form_of_an_encode_call_gives_the_same(vae):
    pixels = video(9)
    (listed,) = pixels
    (latent,) = vae.encode(pixels, CPU)
    for result in (
        vae.encode([listed], CPU)[0],  # both releases
        vae.encode(pixels, device=CPU, tiled=True, **MARCH_2025)[0],
        vae.encode([listed], CPU, end_=False, tiled=True)[0],
        vae.encode((listed,), device="cpu", tiled=True, pbar=False)[0],
        vae.encode(pixels, device=CPU, tiled=True, **SIZES)[0],
        vae.encode(pixels, device=CPU, tiled=True, **SMALLEST)[0],
        vae.encode(pixels, device=CPU, tiled=True, tile_size=None, tile_stride=None)[0],
    ):
        assert torch.equal(result, latent)
        result *= 0.5  # nodes with a latent strength write into them


@pytest.mark.parametrize("as_list", [False, True])
def test_videos_of_a_batch_are_independent(family, vae, as_list):
    pixels, latent = video(5, batch=3), latent_of(family, 2, batch=2)
    latents = vae.encode(list(pixels) if as_list else pixels, device=CPU)
    expected = torch.cat([family.oracle.encode(each[None]) for each in pixels])
    assert relative_error(latents, expected) <= 1e-5
    frames = vae.decode(list(latent) if as_list else latent, CPU, end_=False)
    expected = torch.cat([family.oracle.decode(each[None]) for each in latent])
    assert relative_error(frames, expected) <= 1e-5


@pytest.mark.parametrize(("family", "frames"), [("wan2.1", 1), ("wan2.2", 9)], indirect=["family"])
def test_a_sample_has_the_spread_of_the_posterior(family, vae, frames):
    pixels = video(frames)
    pixels[:, :, 1:] = 0  # static frames draw their own noise too
    mean = vae.encode(pixels, CPU)
    torch.manual_seed(1)
    sampled = vae.encode([pixels[0]], CPU, tiled=False, sample=True)
    posterior = diffusers_vae(family.state).module.encode(pixels).latent_dist
    noise = (sampled - mean) / (posterior.logvar.clamp(-30, 20) / 2).exp()
    if frames == 1:
        torch.manual_seed(1)
        assert relative_error(noise, torch.randn(noise.shape)) <= 1e-4
    else:
        assert not torch.equal(noise[:, :, -1], noise[:, :, -2])
    assert abs(noise.mean()) < 5 / noise.numel() ** 0.5  # five standard errors
    assert abs(noise.std() - 1) < 5 / (2 * noise.numel()) ** 0.5
    assert torch.equal(vae.encode(pixels, CPU), mean)


@both
@pytest.mark.parametrize(
    ("count", "tiled", "end_"), [(1, False, True), (5, True, False), (2, False, True)]
)
def test_decode_equals_the_frames_of_comfyui(family, vae, count, tiled, end_):
    latent = latent_of(family, count)
    before = latent.clone()
    frames = vae.decode(latent, device=CPU, end_=end_, tiled=tiled)[0]
    (expected,) = family.oracle.decode(latent, end_=end_ and count > 1)
    assert relative_error(frames, expected.clamp(-1, 1) if tiled else expected) <= 1e-5
    assert frames.permute(1, 2, 3, 0).is_contiguous()  # the IMAGE that callers create from it
    assert torch.equal(latent, before)
    frames.clamp_(-1, 1).add_(1).div_(2)  # callers do this in place


def test_every_form_of_a_decode_call_gives_the_same(family, vae):
    """The VAE of March 2025 clamps all frames; that of 2026 only those of a tiled decode."""
    latent = latent_of(family, 3)
    (frames,) = vae.decode(latent, CPU, end_=False)
    for result in (
        vae.decode(list(latent), device="cpu", pbar=True)[0],
        vae.decode(latent, device=CPU, pbar=False)[0],
        vae.decode(latent, device=CPU, end_=False, tiled=False, **SIZES)[0],
        vae.decode(latent, CPU, False, False, (34, 34), (18, 16), False)[0],
        vae.decode(latent, device=CPU, output_device="cpu", output_dtype=torch.float32)[0],
    ):
        assert torch.equal(result, frames)
    clamped = frames.clamp(-1, 1)
    assert not torch.equal(clamped, frames)
    for result in (
        vae.decode(list(latent), device="cpu")[0],
        vae.decode(latent, device=CPU, tiled=False, **MARCH_2025)[0],
        vae.decode(latent, device=CPU, tiled=True, **MARCH_2025)[0],
        vae.decode(latent, device=CPU, tiled=True, pbar=False)[0],
        vae.decode(latent, device=CPU, end_=False, tiled=True, **SMALLEST)[0],
        vae.decode(latent, CPU, True, False, (34, 34), (18, 16), False)[0],
    ):
        assert torch.equal(result, clamped)


def test_members_and_outputs_have_the_requested_device_and_dtype(family, tmp_path):
    vae = wrapped(fast_vae(family.state, tmp_path))
    assert type(vae).__name__ != "TAEHV"  # the wrapper calls a VAE of this name differently
    assert (vae.dtype, vae.upsampling_factor) == (torch.float32, family.factor)
    assert vae.model.clear_cache() is None
    assert vae.to(torch.bfloat16).dtype == torch.bfloat16
    latent = latent_of(family, 2).bfloat16()
    assert vae.decode(latent, CPU, pbar=False).dtype == torch.bfloat16
    assert vae.decode(latent, CPU, tiled=True, pbar=False).dtype == torch.float32
    # WANVAE of March 2025 scales the frames in their dtype; bf16 has three digits.
    frames = vae.decode(latent, device=CPU, tiled=False, **MARCH_2025)[0]
    assert (frames.dtype, frames.abs().max()) == (torch.float32, 1)
    assert vae.decode(latent, CPU, output_dtype=torch.float16).dtype == torch.float16
    assert vae.decode(latent, "meta").device.type == "meta"
    assert vae.decode(latent, "meta", tiled=True).device == CPU
    assert vae.decode(latent, "meta", output_device="cpu").device == CPU
    assert vae.encode(video(5).bfloat16(), "meta").device.type == "meta"
    assert vae.to(device=CPU, dtype=torch.float32).dtype == torch.float32
    with refused("^dtype is torch.float8_e4m3fn; expected one of torch\\."):
        vae.to(CPU, torch.float8_e4m3fn)


def test_moving_to_another_device_unloads_through_comfyui(family, vae, tmp_path):
    from comfy.model_management import current_loaded_models

    def loaded(fast):
        return any(each.model is fast.patcher for each in current_loaded_models)

    other = fast_vae(random_state_dict(8), tmp_path)
    other.decode(torch.zeros(1, 16, 1, 3, 4))
    latent = latent_of(family, 2)
    before = vae.decode(latent, CPU)
    assert vae.to(CPU) is vae  # the device of the work: the weights may stay loaded
    assert loaded(family.fast)
    for leave in (vae.to, vae.model.to):
        leave("meta")  # another kind of device, as the host is for a GPU
        assert (loaded(family.fast), loaded(other)) == (False, True)
        assert torch.equal(vae.decode(latent, CPU), before)
    (image,) = family.fast.decode(family.oracle.format.process_out(latent))
    assert relative_error(image, before[0].permute(1, 2, 3, 0).add(1).div(2).clamp(0, 1)) <= 1e-6


FIVE, NINE = torch.zeros(3, 5, 48, 64), torch.zeros(3, 9, 48, 64)


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        ("encode", FIVE, r"videos is \[3, 5, 48, 64\]; expected a tensor \[B, C, T, H, W\] or a l"),
        ("encode", {"samples": 1}, r"videos is a dict; expected a tensor \[B, C, T, H, W\] or a"),
        ("encode", [], "videos is empty; expected one video or more"),
        (
            "encode",
            [FIVE, NINE],
            r"videos\[1\] is \[3, 9, 48, 64\]; expected \[3, 5, 48, 64\], the",
        ),
        ("encode", torch.zeros(1, 4, 5, 48, 64), "frames has 4 channels; this VAE needs 3"),
        ("decode", torch.zeros(16, 2, 3, 4), r"hidden_states is \[16, 2, 3, 4\]; expected a ten"),
        ("decode", torch.zeros(1, 17, 2, 3, 4), "latent has 17 channels; this VAE needs"),
    ],
)
def test_invalid_videos_and_latents_are_a_one_line_error(vae, task, given, message):
    with refused(f"^{message}"):
        getattr(vae, task)(given, CPU)


def convert(vae):
    from fast_video_vae.nodes.wan_wrapper.nodes import ToWanVideoWrapper

    return ToWanVideoWrapper.execute(vae).args[0]


def test_vaes_of_comfyui_2x_decoders_and_those_without_an_encoder_work(stock, family, tmp_path):
    latent = torch.zeros(1, 16, 2, 3, 4)
    kind = type(stock)
    vae = convert(stock)
    assert type(stock) is kind
    assert vae.decode(latent, CPU).shape == (1, 3, 5, 24, 32)
    double = random_state_dict(8, out_channels=12)
    vae = convert(fast_vae(double, tmp_path, dtype=torch.float16))
    assert (vae.upsampling_factor, vae.dtype) == (8, torch.float16)
    assert vae.decode(latent.half(), CPU).shape == (1, 3, 5, 48, 64)
    vae = convert(fast_vae(decoder_of(family.state), tmp_path))
    assert vae.decode(latent, CPU).shape == (1, 3, 5, 24, 32)
    with refused("^the VAE has no encoder; only decoding works with it$"):
        vae.encode(video(1), CPU)


def tiny_vae(_):
    import comfy.sd
    from comfy.taesd.taehv import TAEHV

    return comfy.sd.VAE(sd=TAEHV(16).state_dict())


RGBA = {"image_channels": 4, "out_channels": 4}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: fast_vae(random_qwen21(), folder),
            "got qwen-image-2.1 with 64 latent channels and 4 image channels",
        ),
        (
            lambda folder: fast_vae(random_state_dict(8, **RGBA), folder),
            "got wan2.1 with 16 latent channels and 4 image channels; expected",
        ),
        (tiny_vae, "got a VAE with TAEHV, which cannot be "),
        (lambda _: {}, "got a dict with nothing in it; expected a VAE$"),
    ],
)
def test_an_unsupported_vae_is_a_one_line_error(comfyui, tmp_path, make, message):
    with refused(f"^vae: {message}"):
        convert(make(tmp_path))


def test_frames_fall_back_to_the_host(family, vae, monkeypatch):
    import comfy.model_management as management

    kind = type(family.fast.first_stage_model)
    real, failures = kind.decode_stream, []

    def stream(self, *arguments, **options):
        if options["out"].device.type == "meta":
            failures.append(1)
            raise management.OOM_EXCEPTION("no memory")
        return real(self, *arguments, **options)

    expected = vae.decode(latent_of(family, 2), CPU)
    monkeypatch.setattr(kind, "decode_stream", stream)
    frames = vae.decode(latent_of(family, 2), "meta")
    assert failures
    assert relative_error(frames, expected) <= 1e-5
