"""The fast VAE in ComfyUI's nodes, beside the VAE that ComfyUI loads from the same weights.

The oracle is ComfyUI itself, in this process: its VAE object, its nodes, its tiles.
"""

import contextlib
import copy
import logging

import pytest
import torch

from fast_video_vae.tests.builders import diffusers_name, random_state_dict
from fast_video_vae.tests.nodes.vae.pairs import (
    clip,
    fast_vae,
    latents,
    node,
    relative_error,
    stock_vae,
    v3_node,
)
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22

pytestmark = pytest.mark.comfyui

WIDTH = 8


@pytest.fixture(autouse=True)
def _as_in_a_node(comfyui):
    """ComfyUI runs nodes in inference mode."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def state():
    return random_state_dict(WIDTH)


@pytest.fixture(scope="module")
def stock(comfyui, state):
    return stock_vae(state)


@pytest.fixture(scope="module")
def fast(comfyui, state, tmp_path_factory):
    return fast_vae(state, tmp_path_factory.mktemp("vae"))


# --- the nodes of ComfyUI


@pytest.mark.parametrize(
    ("batch", "frames"),
    [(1, 1), (4, 1), (1, 2), (1, 5), (2, 3)],  # a picture, pictures, 5 and 17 frames, two videos
)
@pytest.mark.parametrize("tiled", [False, True])
def test_decode_is_that_of_stock(stock, fast, batch, frames, tiled):
    samples = {"samples": latents(frames, batch=batch)}
    name, options = ("VAEDecodeTiled", {"tile_size": 512}) if tiled else ("VAEDecode", {})
    (expected,) = node(name, vae=stock, samples=samples, **options)
    (images,) = node(name, vae=fast, samples=samples, **options)
    assert relative_error(images, expected) <= 1e-5
    assert images.is_contiguous()
    assert images.dtype == torch.float32
    assert images.min() >= 0
    assert images.max() <= 1


@pytest.mark.parametrize(
    ("frames", "height", "width", "channels"),
    [
        (1, 64, 64, 3),
        (3, 64, 64, 3),  # fewer than a group: one latent
        (5, 64, 64, 3),
        (17, 64, 64, 3),
        (18, 64, 64, 3),  # the last frame fills no latent
        (5, 67, 70, 3),  # cropped about the centre
        (1, 8, 8, 3),  # the smallest
        (5, 64, 64, 4),  # alpha is left out
        (1, 64, 64, 1),  # missing channels are opaque
    ],
)
@pytest.mark.parametrize("tiled", [False, True])
def test_encode_is_that_of_stock(stock, fast, frames, height, width, channels, tiled):
    pixels = clip(frames, height, width, channels)
    before = pixels.clone()
    options = {"tile_size": 512, "overlap": 64} if tiled else {}
    name = "VAEEncodeTiled" if tiled else "VAEEncode"
    expected = node(name, vae=stock, pixels=pixels, **options)[0]["samples"]
    latent = node(name, vae=fast, pixels=pixels, **options)[0]["samples"]
    assert relative_error(latent, expected) <= 1e-5
    assert torch.equal(pixels, before)


def test_wan_image_to_video_is_that_of_stock(stock, fast):
    inputs = {
        "positive": [[torch.zeros(1, 1, 8), {}]],
        "negative": [[torch.zeros(1, 1, 8), {}]],
        "width": 64,
        "height": 48,
        "length": 9,
        "batch_size": 1,
        "start_image": clip(1),
    }
    expected = v3_node("nodes_wan", "WanImageToVideo", vae=stock, **inputs)
    result = v3_node("nodes_wan", "WanImageToVideo", vae=fast, **inputs)
    wanted, given = (each[0][0][1]["concat_latent_image"] for each in (expected, result))
    assert relative_error(given, wanted) <= 1e-5
    assert result[2]["samples"].shape == expected[2]["samples"].shape


def test_wan_vace_to_video_is_that_of_stock(stock, fast):
    inputs = {
        "positive": [[torch.zeros(1, 1, 8), {}]],
        "negative": [[torch.zeros(1, 1, 8), {}]],
        "width": 64,
        "height": 48,
        "length": 9,
        "batch_size": 1,
        "strength": 1.0,
        "control_video": clip(9),
        "reference_image": clip(1, seed=1),
    }
    expected = v3_node("nodes_wan", "WanVaceToVideo", vae=stock, **inputs)
    result = v3_node("nodes_wan", "WanVaceToVideo", vae=fast, **inputs)
    wanted, given = (each[0][0][1]["vace_frames"][0] for each in (expected, result))
    assert relative_error(given, wanted) <= 1e-5


def test_encode_for_inpaint_is_that_of_stock(stock, fast):
    mask = torch.zeros(1, 70, 66)
    mask[:, 20:40, 20:40] = 1
    inputs = {"pixels": clip(1, 70, 66), "mask": mask, "grow_mask_by": 6}
    (expected,) = node("VAEEncodeForInpaint", vae=stock, **inputs)
    (result,) = node("VAEEncodeForInpaint", vae=fast, **inputs)
    assert relative_error(result["samples"], expected["samples"]) <= 1e-5
    assert torch.equal(result["noise_mask"], expected["noise_mask"])


def test_the_saved_vae_is_the_loaded_one(fast, state):
    weights = fast.get_sd()
    assert weights.keys() == state.keys()
    assert all(weights[key].is_contiguous() for key in weights)
    assert all(torch.equal(weights[key], state[key]) for key in weights)


def test_select_vae_device_keeps_it_fast(fast):
    (selected,) = v3_node("nodes_multigpu", "SelectVAEDeviceNode", vae=fast, device="default")
    latent = latents(2)
    assert selected is not fast
    assert torch.equal(selected.decode(latent), fast.decode(latent))


def test_a_clone_for_another_device_is_fast_and_whole(fast):
    clone = fast.patcher.deepclone_multigpu(new_load_device=torch.device("cpu"))
    assert type(clone.model) is type(fast.first_stage_model)
    assert clone.model is not fast.first_stage_model
    moved = copy.copy(fast)
    moved.patcher, moved.first_stage_model = clone, clone.model
    latent = latents(2)
    assert torch.equal(moved.decode(latent), fast.decode(latent))


# --- the numbers of the object


def test_its_numbers_are_those_of_stock(stock, fast):
    for name in (
        "latent_channels", "latent_dim", "output_channels", "conv_out_channels",
        "pad_channel_value", "vae_dtype", "device", "output_device", "not_video", "crop_input",
        "upscale_index_formula", "downscale_index_formula", "working_dtypes",
    ):  # fmt: skip
        assert getattr(fast, name) == getattr(stock, name), name
    for name in ("upscale_ratio", "downscale_ratio"):
        ours, theirs = getattr(fast, name), getattr(stock, name)
        assert ours[1:] == theirs[1:]
        assert [ours[0](count) for count in range(30)] == [theirs[0](count) for count in range(30)]
    assert fast.spacial_compression_encode() == stock.spacial_compression_encode() == 8
    assert fast.temporal_compression_decode() == stock.temporal_compression_decode() == 4
    assert not fast.is_dynamic()


def test_the_estimates_grow_with_the_picture_and_not_with_the_length(fast):
    for estimate, scale in ((fast.memory_used_decode, 1), (fast.memory_used_encode, 8)):
        shape = (1, 16, 3 * scale, 60 * scale, 104 * scale)
        longer = (1, 16, 300 * scale, 60 * scale, 104 * scale)
        larger = (1, 16, 3 * scale, 120 * scale, 208 * scale)
        dtype = torch.float32
        assert estimate(shape, dtype) == estimate(longer, dtype) < estimate(larger, dtype)
    assert fast.memory_used_decode((1, 16, 8, 8), torch.float32) > 0  # of pictures without time


def test_estimates_are_for_where_the_work_is_done(fast):
    """ComfyUI asks before it brings the weights there; on a GPU the steps are longer."""
    on_gpu = copy.copy(fast)
    on_gpu.device = torch.device("cuda", 0)
    for name, shape in (
        ("memory_used_decode", (1, 16, 8, 128, 128)),
        ("memory_used_encode", (1, 3, 29, 1024, 1024)),
    ):
        here, there = (getattr(vae, name)(shape, torch.float32) for vae in (fast, on_gpu))
        assert there > here


# --- the network's side of the protocol: what ComfyUI's own methods and other packs call


def test_comfyui_s_own_methods_drive_our_network(stock, fast):
    import comfy.sd

    latent, pixels = latents(3), clip(9)
    core, model = comfy.sd.VAE, fast.first_stage_model
    assert model.comfy_has_chunked_io
    assert fast.handles_tiling
    expected = stock.decode(latent)
    tiles = {"tile_x": 64, "tile_y": 64, "overlap": 16}
    for images in (core.decode(fast, latent), core.decode_tiled(fast, latent, **tiles)):
        assert relative_error(images, expected) <= 1e-5
    expected = stock.encode(pixels)
    assert relative_error(core.encode(fast, pixels), expected) <= 1e-5
    assert relative_error(core.encode_tiled(fast, pixels, **tiles), expected) <= 1e-5


def test_a_buffer_may_have_any_dtype_and_strides(fast):
    model, latent = fast.first_stage_model, latents(2)
    expected = model.decode(latent)
    assert expected.shape == model.decode_output_shape(latent.shape)
    for buffer in (
        torch.full(expected.shape, torch.nan),
        torch.full((*expected.shape[:2], *expected.shape[:1:-1]), torch.nan).permute(0, 1, 4, 3, 2),
        torch.full(expected.shape, torch.nan, dtype=torch.float16),
    ):
        model.decode(latent, output_buffer=buffer)
        assert torch.equal(buffer, expected.to(buffer.dtype))


def test_pictures_need_no_time(stock, fast):
    latent = latents(1, batch=3)
    expected = stock.decode(latent)[:, 0]
    assert relative_error(fast.decode(latent[:, :, 0]), expected) <= 1e-5
    model = fast.first_stage_model
    assert model.decode_output_shape((3, 16, 6, 9)) == (3, 3, 48, 72)
    assert torch.equal(model.decode(latent[:, :, 0]), model.decode(latent)[:, :, 0])


def test_an_option_of_a_newer_comfyui_goes_to_its_own_method(fast, monkeypatch):
    import comfy.sd

    seen = {}
    monkeypatch.setattr(
        comfy.sd.VAE, "decode", lambda self, samples, options, **newer: seen.update(newer)
    )
    fast.decode(latents(1), something_new=3)
    assert seen == {"something_new": 3}


def test_the_user_s_output_dtype_is_honoured(fast, monkeypatch):
    from comfy.cli_args import args

    latent = latents(2)
    expected = fast.decode(latent)
    monkeypatch.setattr(args, "fp16_intermediates", True)
    images = fast.decode(latent)
    assert images.dtype == torch.float16
    assert (images - expected).abs().max() < 1e-3
    assert fast.encode(clip(5)).dtype == torch.float16


def test_pictures_can_be_encoded_apart(stock, fast):
    pixels = clip(3)
    expected = torch.cat([stock.encode(image[None]) for image in pixels])
    assert relative_error(fast.encode(pixels, not_video=True), expected) <= 1e-5
    assert relative_error(fast.encode(pixels[:, None]), expected) <= 1e-5  # [B, T, H, W, C]


# --- patches


def patch(key, state):
    generator = torch.Generator().manual_seed(3)
    return {key: ("diff", (torch.randn(state[key].shape, generator=generator) * 0.05,))}


@pytest.mark.parametrize("accelerated", [False, True], ids=["loaded", "accelerated"])
def test_a_patch_changes_the_picture_as_in_stock_and_leaves_no_trace(state, tmp_path, accelerated):
    from fast_video_vae.nodes.vae.accelerate import Choice, accelerate

    stock = stock_vae(state)
    fast = accelerate(stock, Choice()) if accelerated else fast_vae(state, tmp_path)
    latent = latents(3)
    plain = fast.decode(latent)
    key = "decoder.upsamples.4.residual.2.weight"
    patched, patched_stock = copy.copy(fast), copy.copy(stock)
    for vae in (patched, patched_stock):
        vae.patcher = vae.patcher.clone()
        assert vae.patcher.add_patches(patch(key, state)) == [key]
    changed = patched.decode(latent)
    assert relative_error(changed, patched_stock.decode(latent)) <= 1e-5
    assert (changed - plain).abs().max() > 1e-3
    assert torch.equal(fast.decode(latent), plain)
    assert torch.equal(patched.decode(latent), changed)


# --- stop, and memory that runs out


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_an_interrupt_ends_it_at_the_next_block(fast, encode):
    import comfy.model_management as management

    network = fast.first_stage_model.encoder if encode else fast.first_stage_model.decoder
    blocks = []

    def stop(module, inputs):
        blocks.append(module)
        management.interrupt_current_processing(True)

    handle = network.middle[0].register_forward_pre_hook(stop)
    try:
        with pytest.raises(management.InterruptProcessingException):
            fast.encode(clip(33)) if encode else fast.decode(latents(6))
    finally:
        handle.remove()
        management.interrupt_current_processing(False)
    assert len(blocks) == 1
    assert fast.decode(latents(1)).shape[1] == 1


def test_progress_counts_every_frame(fast, monkeypatch):
    import comfy.utils

    reports = []
    hook = lambda value, total, preview, node_id=None: reports.append((value, total))  # noqa: E731
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0)
    fast.decode(latents(4, batch=2), chunk=1)
    assert reports == [(done, 26) for done in (1, 5, 9, 13, 14, 18, 22, 26)]
    reports.clear()
    fast.encode(clip(9))
    assert reports[-1] == (3, 3)


def test_a_preview_is_sent_where_previews_are_on(fast, monkeypatch):
    import comfy.utils
    from comfy.cli_args import LatentPreviewMethod, args

    previews = []
    hook = lambda value, total, preview, node_id=None: previews.append(preview)  # noqa: E731
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    fast.decode(latents(2))
    assert not any(previews)
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Auto)
    fast.decode(latents(2))
    kind, picture, _ = next(preview for preview in previews if preview)
    assert (kind, picture.size) == ("JPEG", (72, 48))


@pytest.mark.parametrize("tiled", [False, True])
def test_when_memory_runs_out_it_goes_on_where_it_stopped(fast, monkeypatch, caplog, tiled):
    import comfy.model_management as management

    kind, latent = type(fast.first_stage_model), latents(4, 24, 24)
    expected = fast.decode(latent)
    real, tries = kind.decode_stream, []

    def failing(self, given, options, *, frames=None, **others):
        begins = 0 if frames is None else frames.start
        tries.append((begins, options.tile))
        stream = real(self, given, options, frames=frames, **others)
        for count, piece in enumerate(stream):
            yield piece
            if len(tries) < most and count == 0:
                raise management.OOM_EXCEPTION("no memory")

    monkeypatch.setattr(kind, "decode_stream", failing)
    monkeypatch.setattr(fast.first_stage_model, "chunk", 1)
    most = 3 if tiled else 4
    with caplog.at_level(logging.WARNING):
        options = {"tile_x": 20, "tile_y": 18, "overlap": 4}
        images = fast.decode_tiled(latent, **options) if tiled else fast.decode(latent)
    assert relative_error(images, expected) <= 1e-5
    assert images.is_contiguous()
    begins, tiles = zip(*tries, strict=True)
    assert list(begins) == sorted(set(begins))  # nothing twice
    assert len(begins) == most
    own = (144, 160) if tiled else None
    later = [(128, 128)] if tiled else [(512, 512), (256, 256)]
    assert list(tiles) == [own, own, *later][:most] or tiled
    assert sum("memory ran out" in record.message for record in caplog.records) == 1


def test_what_fits_nowhere_raises_the_first_error(fast, monkeypatch):
    import comfy.model_management as management

    kind, latent = type(fast.first_stage_model), latents(2)
    expected, real, errors = fast.decode(latent), kind.decode_stream, []

    def full(self, *arguments, **options):
        errors.append(management.OOM_EXCEPTION(f"no memory, try {len(errors)}"))
        raise errors[-1]

    monkeypatch.setattr(kind, "decode_stream", full)
    first = r"^memory ran out in a decode.*\(no memory, try 0\)"
    with pytest.raises(management.OOM_EXCEPTION, match=first):
        fast.decode(latent)
    assert len(errors) > 3
    monkeypatch.setattr(kind, "decode_stream", real)
    assert torch.equal(fast.decode(latent), expected)


def test_an_encode_that_does_not_fit_is_tried_in_tiles(fast, monkeypatch):
    import comfy.model_management as management

    kind, pixels = type(fast.first_stage_model), clip(9, 96, 128)
    expected, real, tiles = fast.encode(pixels), kind.encode_stream, []

    def failing(self, given, options, **others):
        tiles.append(options.tile)
        if len(tiles) < 4:
            raise management.OOM_EXCEPTION("no memory")
        return real(self, given, options, **others)

    monkeypatch.setattr(kind, "encode_stream", failing)
    assert relative_error(fast.encode(pixels), expected) <= 1e-5
    assert tiles == [None, None, (512, 512), (256, 256)]


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_tiled_nodes_ask_for_the_memory_of_a_tile(fast, monkeypatch, encode):
    import comfy.model_management as management

    asked = []

    def load(models, memory_required=0, **options):
        asked.append(memory_required)
        raise InterruptedError

    monkeypatch.setattr(management, "load_models_gpu", load)
    # What a GPU would be asked for; on a CPU what tiles remember stays where it is.
    monkeypatch.setattr(fast, "device", torch.device("cuda"))
    monkeypatch.setattr(management, "cuda_device_context", lambda _: contextlib.nullcontext())
    name, given = "VAEDecodeTiled", {"samples": {"samples": latents(2, 90, 160)}}
    if encode:
        name, given = "VAEEncodeTiled", {"pixels": clip(5, 720, 1280)}
    for tile in (1024, 512, 256):
        with pytest.raises(InterruptedError):
            node(name, vae=fast, tile_size=tile, overlap=64, **given)
    whole = fast.memory_used_encode if encode else fast.memory_used_decode
    shape = (1, 3, 5, 720, 1280) if encode else (1, 16, 2, 90, 160)
    asked.insert(0, whole(torch.Size(shape), torch.float32))
    assert asked == sorted(asked, reverse=True)
    assert asked[-1] < asked[0] / 2


def test_weights_that_comfyui_left_on_the_host_are_brought(fast, monkeypatch):
    import comfy.model_management as management

    brought, kind = [], type(fast.first_stage_model)
    expected = fast.decode(latents(1))
    monkeypatch.setattr(management, "load_models_gpu", lambda *a, **k: None)  # as with --novram
    at_home = lambda self: torch.device("cpu" if brought else "meta")  # noqa: E731
    monkeypatch.setattr(kind, "device", property(at_home, lambda self, value: None))
    monkeypatch.setattr(
        fast.patcher, "partially_load", lambda *a, **k: brought.append((a, k)), raising=True
    )
    assert torch.equal(fast.decode(latents(1)), expected)
    assert brought == [((torch.device("cpu"),), {"extra_memory": 1e32})]


def test_an_error_that_is_not_about_memory_is_told_at_once(fast, monkeypatch):
    calls = []

    def broken(self, *arguments):
        calls.append(1)
        raise RuntimeError("something else")

    monkeypatch.setattr(type(fast), "_decode", broken)
    with pytest.raises(RuntimeError, match="something else"):
        fast.decode(latents(1))
    assert len(calls) == 1


# --- dialects and sizes: what ComfyUI loads too, and what it does not


def test_the_layered_vae_with_alpha_is_that_of_stock(tmp_path):
    state = random_state_dict(WIDTH, image_channels=4, out_channels=4)
    stock, fast = stock_vae(state), fast_vae(state, tmp_path)
    assert fast.output_channels == stock.output_channels == 4
    assert relative_error(fast.decode(latents(1)), stock.decode(latents(1))) <= 1e-5
    for channels in (3, 4):  # without alpha: opaque
        pixels = clip(1, channels=channels)
        assert relative_error(fast.encode(pixels), stock.encode(pixels)) <= 1e-5


@pytest.mark.parametrize("dialect", ["prefix", "diffusers"])
def test_other_key_names_give_the_same_vae(stock, state, tmp_path, dialect):
    rename = diffusers_name if dialect == "diffusers" else "model.{}".format
    fast = fast_vae({rename(key): value for key, value in state.items()}, tmp_path)
    assert relative_error(fast.decode(latents(2)), stock.decode(latents(2))) <= 1e-5
    assert relative_error(fast.encode(clip(5)), stock.encode(clip(5))) <= 1e-5
    assert fast.get_sd().keys() == state.keys()


def test_a_decoder_alone_decodes_as_stock_and_says_that_it_cannot_encode(stock, state, tmp_path):
    fast = fast_vae(
        {key: value for key, value in state.items() if not key.startswith(("encoder.", "conv1."))},
        tmp_path,
    )
    assert relative_error(fast.decode(latents(2)), stock.decode(latents(2))) <= 1e-5
    with pytest.raises(ValueError, match="has no encoder"):
        fast.encode(clip(1))


def test_an_upscaling_decoder_gives_pictures_of_twice_the_size(tmp_path):
    state = random_state_dict(WIDTH, out_channels=12)
    fast, stock = fast_vae(state, tmp_path), stock_vae(state)
    latent = latents(2)
    (images,) = node("VAEDecode", vae=fast, samples={"samples": latent})
    assert images.shape == (5, 96, 144, 3)
    # ComfyUI leaves the phases of the pixels in channels.
    phases = stock.decode(latent)[0].movedim(-1, 1)
    expected = torch.nn.functional.pixel_shuffle(phases, 2).movedim(1, -1)
    assert relative_error(images, expected) <= 1e-5
    (tiled,) = node("VAEDecodeTiled", vae=fast, samples={"samples": latent}, tile_size=512)
    assert torch.equal(tiled, images)
    assert fast.spacial_compression_decode() == 16
    assert fast.encode(clip(1)).shape == (1, 16, 1, 8, 8)


def test_stages_of_any_width_load_where_comfyui_s_class_does_not_fit(tmp_path):
    encoder, decoder = random_state_dict(4), random_state_dict(12)
    state = {
        **{key: value for key, value in decoder.items() if not key.startswith("encoder.")},
        **{key: value for key, value in encoder.items() if key.startswith("encoder.")},
    }
    fast = fast_vae(state, tmp_path)
    assert relative_error(fast.decode(latents(2)), stock_vae(decoder).decode(latents(2))) <= 1e-5
    wanted = stock_vae({**encoder, "conv1.weight": state["conv1.weight"],
                        "conv1.bias": state["conv1.bias"]})  # fmt: skip
    assert relative_error(fast.encode(clip(5)), wanted.encode(clip(5))) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("width", [24, 96], ids=["LightVAE", "Wan 2.1"])
def test_the_published_widths_are_those_of_stock(tmp_path, width):
    state = random_state_dict(width)
    stock, fast = stock_vae(state), fast_vae(state, tmp_path)
    for frames in (1, 2, 5):
        assert relative_error(fast.decode(latents(frames)), stock.decode(latents(frames))) <= 1e-5
    for frames in (1, 5, 17):
        assert relative_error(fast.encode(clip(frames)), stock.encode(clip(frames))) <= 1e-5


# --- the Wan 2.2 layout


def wan22_latents(frames, channels=48, batch=1):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, frames, 3, 4, generator=generator)


def test_a_narrow_wan_2_2_loads_where_comfyui_s_class_does_not_fit(tmp_path):
    from fast_video_vae.tests.benchmarks.peers import comfyui_vae

    state = random_wan22(8, 16)
    fast, network = fast_vae(state, tmp_path), comfyui_vae(state).module
    latent = wan22_latents(3)
    expected = network.decode(latent).movedim(1, -1).add(1).div(2).clamp(0, 1)
    for images in (
        fast.decode(latent),
        node("VAEDecode", vae=fast, samples={"samples": latent})[0][None],
        node("VAEDecodeTiled", vae=fast, samples={"samples": latent}, tile_size=512)[0][None],
    ):
        assert relative_error(images, expected) <= 1e-5
    pixels = clip(6, 70, 68)
    cropped = pixels[:5, 3:67, 2:66].movedim(-1, 0)[None] * 2 - 1
    assert relative_error(fast.encode(pixels), network.encode(cropped)) <= 1e-5
    assert (fast.latent_channels, fast.output_channels) == (48, 3)
    assert fast.spacial_compression_decode() == fast.spacial_compression_encode() == 16
    assert fast.temporal_compression_decode() == 4
    assert fast.get_sd().keys() == state.keys()


def test_wan_2_2_image_to_video_starts_from_the_image(tmp_path):
    fast = fast_vae(random_wan22(), tmp_path)
    image = clip(1, 64, 96)
    (latent,) = v3_node(
        "nodes_wan",
        "Wan22ImageToVideoLatent",
        vae=fast,
        width=96,
        height=64,
        length=9,
        batch_size=1,
        start_image=image,
    )
    assert latent["samples"].shape == (1, 48, 3, 4, 6)
    config = fast.first_stage_model.config
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in
                 (config.latent_mean, config.latent_std))  # fmt: skip
    start = latent["samples"][:, :, :1] * std + mean
    shown = latent["samples"][:, :, :1]
    encoded = fast.encode(image)
    # Whichever ComfyUI's node gives, normalised or not, it is the image's latent.
    assert min(relative_error(start, encoded), relative_error(shown, encoded)) <= 1e-4


def test_qwen_image_2_1_is_a_vae_of_pictures(tmp_path):
    from fast_video_vae.tests.benchmarks.peers import diffusers_vae

    state = random_qwen21()
    fast, peer = fast_vae(state, tmp_path), diffusers_vae(state)
    assert (fast.latent_dim, fast.latent_channels, fast.output_channels) == (2, 64, 4)
    assert fast.spacial_compression_decode() == 16
    assert fast.temporal_compression_decode() is None
    latent = wan22_latents(1, channels=64, batch=2)
    expected = peer.decode(latent)[:, :, 0].movedim(1, -1).add(1).div(2)
    for samples in (latent, latent[:, :, 0]):
        (images,) = node("VAEDecode", vae=fast, samples={"samples": samples})
        assert relative_error(images, expected) <= 1e-5
    (tiled,) = node("VAEDecodeTiled", vae=fast, samples={"samples": latent[:, :, 0]}, tile_size=512)
    assert torch.equal(tiled, images)
    pixels = clip(2, 48, 64, channels=4)
    expected = peer.encode(pixels.movedim(-1, 1)[:, :, None] * 2 - 1)[:, :, 0]
    assert relative_error(fast.encode(pixels), expected) <= 1e-5
    opaque = torch.nn.functional.pad(pixels[..., :3], (0, 1), value=1.0)
    assert torch.equal(fast.encode(pixels[..., :3]), fast.encode(opaque))


def test_pictures_that_do_not_fit_are_cut_in_space_alone(tmp_path, monkeypatch):
    import comfy.model_management as management

    fast = fast_vae(random_qwen21(), tmp_path)
    latent = torch.randn(1, 64, 20, 20, generator=torch.Generator().manual_seed(0))
    expected = fast.decode(latent)

    kind = type(fast.first_stage_model)
    for name in ("decode_stream", "encode_stream"):
        real = getattr(kind, name)

        def full(self, given, options, *, real=real, **others):
            if options.tile is None:
                raise management.OOM_EXCEPTION("no memory")
            return real(self, given, options, **others)

        monkeypatch.setattr(kind, name, full)
    assert relative_error(fast.decode_tiled(latent, tile_x=16, tile_y=16), expected) <= 1e-5
    assert relative_error(fast.decode(latent), expected) <= 1e-5
    assert fast.encode(clip(1, 64, 64, channels=4)).shape == (1, 64, 4, 4)


@pytest.mark.slow
def test_wan_2_2_at_full_size_is_that_of_stock(tmp_path):
    from fast_video_vae.nodes.vae.accelerate import Choice, accelerate

    stock = stock_vae(random_wan22(160, 256))
    fast = accelerate(stock, Choice())
    assert fast is not stock
    for name in ("latent_channels", "output_channels", "pad_channel_value", "latent_dim",
                 "upscale_index_formula", "downscale_index_formula"):  # fmt: skip
        assert getattr(fast, name) == getattr(stock, name), name
    for frames in (1, 2):
        latent = wan22_latents(frames)
        assert relative_error(fast.decode(latent), stock.decode(latent)) <= 1e-5
    for frames in (1, 5):
        pixels = clip(frames, 32, 48)
        assert relative_error(fast.encode(pixels), stock.encode(pixels)) <= 1e-5
