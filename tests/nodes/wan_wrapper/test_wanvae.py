"""The VAE for ComfyUI-WanVideoWrapper against ComfyUI's network and latent formats."""

import pytest
import torch

from fast_video_vae.tests.benchmarks.peers import comfyui_vae, diffusers_vae
from fast_video_vae.tests.builders import decoder_of, random_state_dict, refused
from fast_video_vae.tests.nodes.vae.pairs import fast_vae, latents, relative_error, video, wrapped
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

CPU = torch.device("cpu")
STATES = {16: random_state_dict(8), 48: random_wan22(8, 16)}  # by latent channels


@pytest.mark.parametrize(
    ("channels", "count", "tiled", "end_", "size"),
    [
        (16, 1, True, True, (16, 24)),  # a single frame has no end
        (16, 8, False, True, (24, 16)),  # two frames before the last fill no latent
        (48, 6, True, False, (51, 70)),  # frames and pixels at the edges that fill no latent
        (48, 2, False, True, (16, 16)),
    ],
)
def test_both_ways_equal_comfyui_s_network(channels, count, tiled, end_, size, tmp_path):
    from comfy.latent_formats import Wan21, Wan22

    def parts(x):
        return x.split([x.shape[2] - 1, 1], dim=2) if end_ and x.shape[2] > 1 else (x,)

    vae, pixels = wrapped(fast_vae(STATES[channels], tmp_path)), video(count, *size)
    network, form = comfyui_vae(STATES[channels]), {16: Wan21, 48: Wan22}[channels]()
    height, width = (side - side % vae.upsampling_factor for side in size)
    given, options = torch.cat([pixels, -pixels]), {"tiled": tiled, "end_": end_}
    before, latent = given.clone(), vae.encode(given, device=CPU, **options)
    assert (latent.dtype, latent.device) == (torch.float32, CPU)
    kept, found = latent.clone(), vae.decode(latent, device=CPU, **options)
    # Videos of a batch are independent.
    for pixels, mean, frames in zip(given.split(1), latent.split(1), found.split(1), strict=True):
        means = [network.encode(part) for part in parts(pixels[..., :height, :width])]
        assert relative_error(mean, form.process_in(torch.cat(means, dim=2))) <= 1e-5
        images = [network.decode(part) for part in parts(form.process_out(mean))]
        expected = torch.cat(images, dim=2)
        assert relative_error(frames, expected.clamp(-1, 1) if tiled else expected) <= 1e-5
        assert frames[0].movedim(0, -1).is_contiguous()  # the IMAGE that callers create from it
    assert torch.equal(given, before)
    assert torch.equal(latent, kept)
    found.clamp_(-1, 1).add_(1).div_(2)  # callers do this in place


# Size and strides of tiles: the least of a node, and none.
@pytest.mark.parametrize(("tile", "more"), [((5, 4, 4), {}), (None, {"pbar": False})])
def test_every_form_of_a_call_gives_the_same(fast, tile, more):
    """The VAE of March 2025 clamps all frames; that of 2026 only those of a tiled decode."""
    vae, pixels, latent = wrapped(fast), video(9), latents(3, 3, 4)
    means = vae.encode(pixels, CPU)
    frames = vae.decode(latent, CPU, False, False, (34, 34), (18, 16), False)
    clamped = frames.clamp(-1, 1)
    assert not torch.equal(clamped, frames)
    named = {"tile_size": tile and tile[:1] * 2, "tile_stride": tile and tile[1:], **more}
    for kind in (torch.Tensor.clone, list, tuple):
        for tiled, expected in ((True, clamped), (False, frames if more else clamped)):
            decoded = vae.decode(kind(latent), device="cpu", tiled=tiled, **named)
            assert torch.equal(decoded, expected)
            encoded = vae.encode(kind(pixels), device="cpu", tiled=tiled, **named)
            assert torch.equal(encoded, means)
            encoded *= 0.5  # nodes with a latent strength write into it


def test_a_sample_has_the_spread_of_the_posterior(tmp_path):
    vae, pixels = wrapped(fast_vae(STATES[16], tmp_path)), video(9)
    pixels[:, :, 1:] = 0  # static frames draw their own noise too
    mean = vae.encode(pixels, CPU)
    for given in (pixels, pixels[:, :, :1]):
        torch.manual_seed(1)
        sampled = vae.encode([given[0]], CPU, tiled=False, sample=True)
        posterior = diffusers_vae(STATES[16]).module.encode(given).latent_dist
        spread = (posterior.logvar.clamp(-30, 20) / 2).exp()
        noise = (sampled - mean[:, :, : sampled.shape[2]]) / spread
        assert abs(noise.std() - 1) < 5 / (2 * noise.numel()) ** 0.5  # five standard errors
        steps = noise.diff(dim=2).abs().mean((0, 1, 3, 4))  # 1.13 is expected of independent noise
        assert (steps > 0.5).all()
    torch.manual_seed(1)
    assert relative_error(noise, torch.randn(noise.shape)) <= 1e-4
    assert torch.equal(vae.encode(pixels, CPU), mean)


@pytest.mark.parametrize("channels", STATES)
def test_members_and_outputs_have_the_requested_device_and_dtype(channels, tmp_path):
    vae = wrapped(fast_vae(STATES[channels], tmp_path))
    assert type(vae).__name__ != "TAEHV"  # the wrapper calls a VAE of this name differently
    assert (vae.dtype, vae.upsampling_factor) == (torch.float32, {16: 8, 48: 16}[channels])
    assert vae.model.clear_cache() is None
    assert vae.to(torch.bfloat16).dtype == torch.bfloat16
    latent = latents(2, 3, 4, channels=channels).bfloat16()
    for place, more, dtype, device in (
        ("cpu", {"pbar": False, "output_dtype": torch.float16}, torch.float16, "cpu"),
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

    vae, latent = wrapped(fast), latents(2, 3, 4)
    stock.decode(latent)
    before = vae.decode(latent, CPU)
    # The device of the work, where the weights may stay; and another kind, as the host for a GPU.
    for device, stays in ((CPU, True), ("meta", False)):
        assert vae.model.to(device) is vae
        models = [each.model for each in current_loaded_models]
        assert [each.patcher in models for each in (fast, stock)] == [stays, True]
        assert torch.equal(vae.decode(latent, CPU), before)


def test_invalid_videos_and_latents_are_a_one_line_error(fast):
    vae, five, nine = wrapped(fast), video(5)[0], video(9)[0]
    shapes = r"; expected a tensor \[B, C, T, H, W\] or a list of \[C, T, H, W\]$"
    for work, given, message in (
        (vae.encode, five, rf"videos is \[3, 5, 48, 64\]{shapes}"),
        (vae.encode, {"samples": 1}, f"videos is a dict{shapes}"),
        (vae.encode, [], "videos is empty; expected one video or more$"),
        (vae.encode, [five, nine], r"videos\[1\] is \[3, 9, .*; expected \[3, 5, 48, 64\], the"),
        (vae.decode, five, rf"hidden_states is \[3, 5, 48, 64\]{shapes}"),
    ):
        with refused(f"^{message}"):
            work(given, CPU)


def test_the_node_converts_every_wan_vae_and_refuses_others(stock, state, tmp_path):
    import comfy.sd
    from comfy.taesd.taehv import TAEHV

    from fast_video_vae.nodes.wan_wrapper.nodes import ToWanVideoWrapper

    def convert(vae, **choice):
        given = fast_vae(vae, tmp_path, **choice) if type(vae) is dict and vae else vae
        return ToWanVideoWrapper.execute(given).args[0]

    latent = torch.zeros(1, 16, 2, 3, 4)
    assert convert(stock).decode(latent, CPU).shape == (1, 3, 5, 24, 32)
    assert type(stock) is comfy.sd.VAE
    double = convert(random_state_dict(8, out_channels=12), dtype=torch.float16)
    assert (double.upsampling_factor, double.dtype) == (8, torch.float16)
    assert double.decode(latent.half(), CPU).shape == (1, 3, 5, 48, 64)
    with refused("^the VAE has no encoder; only decoding works with it$"):
        convert(decoder_of(state)).encode(video(1), CPU)
    rgba = random_state_dict(8, image_channels=4, out_channels=4)
    for given, message in (
        (random_qwen21(), "qwen-image-2.1 with 64 latent channels and 4 image channels"),
        (rgba, "wan2.1 with 16 latent channels and 4 image channels; expected"),
        (comfy.sd.VAE(sd=TAEHV(16).state_dict()), "a VAE with TAEHV, which cannot be "),
        ({}, "a dict with nothing in it; expected a VAE$"),
    ):
        with refused(f"^vae: got {message}"):
            convert(given)


def test_frames_fall_back_to_the_host(fast, monkeypatch):
    import comfy.model_management as management

    kind, failures, vae = type(fast.first_stage_model), [], wrapped(fast)
    real, expected = kind.decode_stream, vae.decode(latents(2, 3, 4), CPU)

    def stream(self, *arguments, **options):
        if options["out"].device.type == "meta":
            failures.append(1)
            raise management.OOM_EXCEPTION("no memory")
        return real(self, *arguments, **options)

    monkeypatch.setattr(kind, "decode_stream", stream)
    assert relative_error(vae.decode(latents(2, 3, 4), "meta"), expected) <= 1e-5
    assert failures
