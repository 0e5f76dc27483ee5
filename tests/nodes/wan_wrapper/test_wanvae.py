"""The VAE for ComfyUI-WanVideoWrapper, called in every form that the nodes of that pack use.

The oracle is ComfyUI's network with the same weights, run separately on each part of a video, with
the statistics of ComfyUI's latent formats.
"""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.nodes.vae.pairs import (
    fast_vae,
    out_of_memory,
    relative_error,
    stopped_at,
)
from fast_video_vae.tests.nodes.wan_wrapper.wrapped import CPU, Oracle, video, wrapped
from fast_video_vae.tests.wan22 import random_wan22

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.fixture(scope="module")
def families(comfyui, tmp_path_factory):
    """Factory of VAEs with narrow random weights: fast, oracle, channels and compression."""

    @functools.cache
    def make(name):
        state = random_state_dict(8) if name == "wan2.1" else random_wan22(8, 16)
        fast = fast_vae(state, tmp_path_factory.mktemp("vae"))
        channels, factor = (16, 8) if name == "wan2.1" else (48, 16)
        return SimpleNamespace(
            state=state, fast=fast, oracle=Oracle(state), channels=channels, factor=factor
        )

    return make


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
def test_the_vae_has_the_members_that_nodes_use(family, vae):
    assert type(vae).__name__ != "TAEHV"  # the wrapper calls a VAE of this name differently
    assert vae.dtype == torch.float32
    assert vae.upsampling_factor == family.factor
    assert vae.to(CPU) is vae
    assert vae.to("cpu") is vae
    assert vae.to(device=CPU, dtype=torch.float32) is vae
    assert vae.model.clear_cache() is None
    vae.model.to(CPU)


def test_the_requested_dtype_is_used(vae):
    assert vae.to(torch.bfloat16).dtype == torch.bfloat16
    latent = torch.zeros(1, vae.encode(video(1), CPU).shape[1], 1, 3, 4)
    assert vae.decode(latent, CPU, end_=False).dtype == torch.bfloat16
    assert vae.to(CPU, torch.float32).dtype == torch.float32


def test_an_unsupported_dtype_is_an_error(vae):
    with pytest.raises(ValueError, match=r"^dtype is torch.float8_e4m3fn; expected one of torch\."):
        vae.to(CPU, torch.float8_e4m3fn)


@both
@pytest.mark.parametrize(
    ("frames", "tiled"),
    [(1, False), (2, True), (6, False), (17, True)],  # 2 and 6 have frames that fill no latent
)
def test_encode_equals_the_normalised_latents_of_comfyui(family, vae, frames, tiled):
    pixels = video(frames)
    before = pixels.clone()
    latents = vae.encode(pixels, device=CPU, tiled=tiled)
    expected = family.oracle.encode(pixels)
    assert relative_error(latents, expected) <= 1e-5
    assert latents.dtype == torch.float32
    assert latents.device == CPU
    assert torch.equal(pixels, before)


def test_every_form_of_an_encode_call_gives_the_same(vae):
    pixels = video(9)
    (listed,) = pixels
    (latent,) = vae.encode(pixels, CPU)
    assert latent.ndim == 4
    sizes = {"tile_size": (34, 34), "tile_stride": (18, 16)}
    for result in (
        vae.encode([listed], CPU)[0],
        vae.encode([listed], CPU, tiled=False)[0],
        vae.encode([listed], CPU, end_=False, tiled=True)[0],
        vae.encode((listed,), device="cpu", tiled=True, pbar=False)[0],
        vae.encode(pixels, device=CPU, tiled=True, **sizes)[0],
        vae.encode(pixels, device=CPU, tiled=True, tile_size=None, tile_stride=None)[0],
        vae.encode(pixels.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3), CPU)[0],
    ):
        assert torch.equal(result, latent)


@pytest.mark.parametrize("as_list", [False, True])
def test_videos_of_a_batch_are_independent(family, vae, as_list):
    pixels, latent = video(5, batch=3), latent_of(family, 2, batch=2)
    latents = vae.encode(list(pixels) if as_list else pixels, device=CPU)
    expected = torch.cat([family.oracle.encode(each[None]) for each in pixels])
    assert relative_error(latents, expected) <= 1e-5
    frames = vae.decode(list(latent) if as_list else latent, CPU, end_=False)
    expected = torch.cat([family.oracle.decode(each[None]) for each in latent])
    assert relative_error(frames, expected) <= 1e-5


@both
def test_edge_pixels_that_fill_no_latent_are_dropped(family, vae):
    pixels = video(5, 51, 70)
    step = family.factor
    whole = pixels[..., : 51 // step * step, : 70 // step * step]
    assert relative_error(vae.encode(pixels, CPU), family.oracle.encode(whole)) <= 1e-5


@pytest.mark.parametrize("frames", [2, 6, 8, 18])  # 8: two frames before the last fill no latent
def test_the_end_frame_is_encoded_separately(family, vae, frames):
    pixels = video(frames)
    latents = vae.encode([pixels[0]], CPU, end_=True, tiled=False)
    assert latents.shape[2] == (frames - 2) // 4 + 2
    assert relative_error(latents, family.oracle.encode(pixels, end_=True)) <= 1e-5


def test_a_single_frame_or_latent_ignores_end(family, vae):
    pixels, latent = video(1), latent_of(family, 1)
    assert torch.equal(vae.encode(pixels, CPU, end_=True), vae.encode(pixels, CPU))
    assert torch.equal(vae.decode(latent, CPU, end_=True), vae.decode(latent, CPU))


@pytest.mark.parametrize(("family", "frames"), [("wan2.1", 1), ("wan2.2", 9)], indirect=["family"])
def test_a_sample_has_the_spread_of_the_posterior(family, vae, frames):
    pixels = video(frames)
    pixels[:, :, 1:] = 0  # static frames draw their own noise too
    mean = vae.encode(pixels, CPU)
    torch.manual_seed(1)
    sampled = vae.encode([pixels[0]], CPU, tiled=False, sample=True)
    again = vae.encode([pixels[0]], CPU, tiled=False, sample=True)
    posterior = diffusers_vae(family.state).module.encode(pixels).latent_dist
    noise = (sampled - mean) / (posterior.logvar.clamp(-30, 20) / 2).exp()
    if frames == 1:
        torch.manual_seed(1)
        assert relative_error(noise, torch.randn(noise.shape)) <= 1e-4
    assert abs(noise.mean()) < 5 / noise.numel() ** 0.5  # five standard errors
    assert abs(noise.std() - 1) < 5 / (2 * noise.numel()) ** 0.5
    assert not torch.equal(sampled, again)
    if frames > 1:
        assert not torch.equal(noise[:, :, -1], noise[:, :, -2])
    assert torch.equal(vae.encode(pixels, CPU), mean)


@both
@pytest.mark.parametrize(("count", "tiled"), [(1, False), (2, True), (5, False)])
def test_decode_equals_the_frames_of_comfyui(family, vae, count, tiled):
    latent = latent_of(family, count)
    before = latent.clone()
    frames = vae.decode(latent, device=CPU, end_=False, tiled=tiled)[0]
    (expected,) = family.oracle.decode(latent)
    assert expected.abs().max() > 1 or count == 1
    expected = expected.clamp(-1, 1) if tiled else expected
    assert relative_error(frames, expected) <= 1e-5
    assert frames.dtype == torch.float32
    assert frames.permute(1, 2, 3, 0).is_contiguous()  # the IMAGE that callers create from it
    assert torch.equal(latent, before)
    frames.clamp_(-1, 1).add_(1).div_(2)  # callers do this in place


def test_every_form_of_a_decode_call_gives_the_same(family, vae):
    latent = latent_of(family, 3)
    (frames,) = vae.decode(latent, CPU, end_=False)
    sizes = {"tile_size": (34, 34), "tile_stride": (18, 16)}
    for result in (
        vae.decode(latent, device=CPU, pbar=False)[0],
        vae.decode(list(latent), device="cpu", pbar=True)[0],
        vae.decode(latent, device=CPU, end_=False, tiled=False, **sizes)[0],
        vae.decode(latent, CPU, False, False, (34, 34), (18, 16), False)[0],
        vae.decode(latent, device=CPU, output_device="cpu", output_dtype=torch.float32)[0],
    ):
        assert torch.equal(result, frames)
    clamped = frames.clamp(-1, 1)
    for result in (
        vae.decode(list(latent), device="cpu")[0],
        vae.decode(latent, device=CPU, end_=False, tiled=True, **sizes)[0],
        vae.decode(latent, CPU, True, False, (34, 34), (18, 16), False)[0],
    ):
        assert torch.equal(result, clamped)


@both
@pytest.mark.parametrize(("count", "tiled"), [(2, False), (4, True)])
def test_the_end_latent_is_decoded_separately(family, vae, count, tiled):
    latent = latent_of(family, count)
    frames = vae.decode(latent, device=CPU, end_=True, tiled=tiled)
    assert frames.shape[2] == 4 * (count - 2) + 2
    expected = family.oracle.decode(latent, end_=True)
    expected = expected.clamp(-1, 1) if tiled else expected
    assert relative_error(frames, expected) <= 1e-5


def test_outputs_have_the_requested_device_and_dtype(family, tmp_path):
    fast = fast_vae(family.state, tmp_path, dtype=torch.bfloat16)
    vae, latent = wrapped(fast), latent_of(family, 2).bfloat16()
    assert vae.decode(latent, CPU, pbar=False).dtype == vae.dtype == torch.bfloat16
    assert vae.decode(latent, CPU, tiled=True, pbar=False).dtype == torch.float32
    assert vae.decode(latent, CPU, output_dtype=torch.float16).dtype == torch.float16
    assert vae.decode(latent, "meta").device.type == "meta"
    assert vae.decode(latent, "meta", tiled=True).device == CPU
    assert vae.decode(latent, "meta", output_device="cpu").device == CPU
    assert vae.encode(video(5).bfloat16(), "meta").device.type == "meta"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("wan2.1", torch.bfloat16), ("wan2.2", torch.float16)],
    indirect=["family"],
)
def test_low_precision_error_is_bounded_by_comfyui(family, tmp_path, dtype):
    """At most twice the error of ComfyUI's network in that dtype."""
    vae = wrapped(fast_vae(family.state, tmp_path, dtype=dtype))
    oracle, rough = family.oracle, Oracle(family.state, dtype)
    assert vae.dtype == dtype
    pixels, latent = video(9).to(dtype), latent_of(family, 3).to(dtype)
    exact, theirs = oracle.encode(pixels.float()), rough.encode(pixels)
    assert relative_error(vae.encode(pixels, CPU), exact) <= 2 * relative_error(theirs, exact)
    exact, theirs = (each.decode(latent.float()) for each in (oracle, rough))
    result = vae.decode(latent, CPU, end_=False).float()
    assert relative_error(result, exact) <= 2 * relative_error(theirs, exact)


def loaded():
    import comfy.model_management as management

    return [each.model for each in management.current_loaded_models]


def test_moving_to_another_device_unloads_through_comfyui(family, vae, tmp_path):
    other = fast_vae(random_state_dict(8), tmp_path)
    other.decode(torch.zeros(1, 16, 1, 3, 4))
    latent = latent_of(family, 2)
    before = vae.decode(latent, CPU)
    assert family.fast.patcher in loaded()
    assert vae.to(CPU) is vae  # the device of the work: the weights may stay loaded
    assert family.fast.patcher in loaded()
    for leave in (vae.to, vae.model.to):
        leave("meta")  # another kind of device, as the host is for a GPU
        assert family.fast.patcher not in loaded()
        assert other.patcher in loaded()
        assert torch.equal(vae.decode(latent, CPU), before)
    (image,) = family.fast.decode(family.oracle.format.process_out(latent))
    expected = before[0].permute(1, 2, 3, 0).add(1).div(2).clamp(0, 1)
    assert relative_error(image, expected) <= 1e-6


@pytest.mark.gpu
def test_no_weight_stays_on_the_gpu(family, vae):
    device = family.fast.device
    if device.type == "cpu":
        pytest.skip("ComfyUI runs on the CPU here")
    network = family.fast.first_stage_model
    for leave in (vae.to, vae.model.to):
        frames = vae.to(device).decode(latent_of(family, 2), device)
        latents = vae.encode(video(5), device)
        assert frames.device == latents.device == device
        assert {each.device for each in network.parameters()} == {device}
        leave("cpu")
        assert {each.device.type for each in network.parameters()} == {"cpu"}
        assert network.weight_bytes() == sum(each.nbytes for each in network.parameters())


def test_patches_of_the_vae_apply(family):
    key = "decoder.head.2.weight"
    patched = copy.copy(family.fast)
    patched.patcher = patched.patcher.clone()
    change = torch.full(family.state[key].shape, 0.02)
    assert patched.patcher.add_patches({key: ("diff", (change,))}) == [key]
    latent = latent_of(family, 2)
    oracle = Oracle(family.state | {key: family.state[key] + change})
    for vae, network in ((wrapped(patched), oracle), (wrapped(family.fast), family.oracle)):
        frames = vae.decode(latent, CPU, end_=False)
        assert relative_error(frames, network.decode(latent)) <= 1e-5


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_out_of_memory_is_retried_and_then_tiled(family, vae, monkeypatch, encode):
    def run():
        return vae.encode(video(9), CPU) if encode else vae.decode(latent_of(family, 3), CPU)

    expected, name = run(), "encode_stream" if encode else "decode_stream"
    side = 64 * family.fast.spacial_compression_encode()
    for failures, tiles in ((1, [None, None]), (2, [None, None, (side, side)])):
        with monkeypatch.context() as patch:
            calls = out_of_memory(patch, family.fast, name, failures)
            assert relative_error(run(), expected) <= 1e-5
        assert [options.tile for options in calls] == tiles


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


def test_progress_is_shown_unless_pbar_is_off(family, vae, progress):
    vae.decode(latent_of(family, 3, batch=2), CPU)
    assert progress[-1] == (18, 18)
    vae.encode(video(10), CPU, end_=True)
    assert progress[-1] == (4, 4)
    progress.clear()
    vae.decode(latent_of(family, 3), CPU, pbar=False)
    vae.encode(video(9), CPU, pbar=False)
    assert progress == []


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.parametrize("pbar", [False, True])
def test_an_interrupt_ends_the_call(family, vae, encode, pbar):
    def run():
        if encode:
            return vae.encode(video(17), CPU, pbar=pbar)
        return vae.decode(latent_of(family, 5), CPU, pbar=pbar)

    network = family.fast.first_stage_model
    with stopped_at((network.encoder if encode else network.decoder).middle[0]):
        run()
    assert run().ndim == 5
