"""The fast VAE in ComfyUI's nodes, against the VAE that ComfyUI loads from the same weights.

The oracle is ComfyUI itself, in this process: its VAE object, its nodes, its tiles. At the end are
VAEs of other sizes and key names, also such as ComfyUI does not load.
"""

import copy

import pytest
import torch

from fast_video_vae.tests.builders import decoder_of, diffusers_name, random_state_dict
from fast_video_vae.tests.nodes.vae.pairs import (
    accelerated,
    assert_same_numbers,
    clip,
    fast_vae,
    frames,
    latents,
    narrow_seedvr2,
    node,
    ours,
    relative_error,
    small_latents,
    stock_vae,
    v3_node,
)
from fast_video_vae.tests.nodes.video.clips import held
from fast_video_vae.tests.seedvr2 import WIDTHS, random_seedvr2
from fast_video_vae.tests.wan22 import random_wan22

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.mark.parametrize(
    ("batch", "count"),
    [(1, 1), (3, 1), (2, 2), (1, 4)],  # a picture, pictures, two videos, 13 frames
)
def test_every_way_to_decode_equals_stock(family, batch, count):
    samples = {"samples": small_latents(count, batch=batch)}
    before = samples["samples"].clone()
    (expected,) = node("VAEDecode", vae=family.stock, samples=samples)
    assert expected.shape == (batch * (4 * count - 3), 32, 48, 3)
    inputs = {"vae": family.fast, "samples": samples}
    for images in (
        node("VAEDecode", **inputs)[0],
        node("VAEDecodeTiled", **inputs, tile_size=512)[0],
        node("VAEDecodeTiled", **inputs, tile_size=64, overlap=0)[0],
        *(ours("Decode", **inputs, chunk=chunk).args[0] for chunk in (1, 2, -1)),
    ):
        assert relative_error(images, expected) <= 1e-5
        assert images.is_contiguous()
        assert images.dtype == torch.float32
        assert 0 <= images.min() <= images.max() <= 1
    assert torch.equal(samples.pop("samples"), before)
    assert not samples


@pytest.mark.parametrize(
    ("count", "channels"),
    [
        (1, 3),
        (3, 3),  # fewer than a group: one latent
        (5, 4),  # alpha is left out
        (14, 3),  # the last frame fills no latent
    ],
)
def test_every_way_to_encode_equals_stock(family, count, channels):
    pixels = frames(count, channels=channels)
    before = pixels.clone()
    expected = family.stock.encode(pixels)
    assert expected.shape == (1, 16, (count - 1) // 4 + 1, 4, 6)
    inputs = {"vae": family.fast, "pixels": pixels}
    for latent in (
        node("VAEEncode", **inputs)[0],
        node("VAEEncodeTiled", **inputs, tile_size=512, overlap=64)[0],
        node("VAEEncodeTiled", **inputs, tile_size=64, overlap=0)[0],
        *(ours("Encode", **inputs, chunk=chunk).args[0] for chunk in (1, 2, -1)),
        {"samples": family.fast.encode(pixels[None])},  # [B, T, H, W, C]
    ):
        assert relative_error(latent["samples"], expected) <= 1e-5
    assert torch.equal(pixels, before)


@pytest.mark.parametrize(
    ("count", "height", "width", "channels"),
    [
        (5, 67, 70, 3),  # cropped about the centre
        (1, 8, 8, 3),  # the smallest
        (1, 64, 64, 1),  # missing channels are opaque
    ],
)
@pytest.mark.parametrize("tiled", [False, True])
def test_images_of_any_size_are_fitted_as_in_stock(
    stock, fast, count, height, width, channels, tiled
):
    pixels = clip(count, height, width, channels)
    options = {"tile_size": 512, "overlap": 64} if tiled else {}
    name = "VAEEncodeTiled" if tiled else "VAEEncode"
    expected, latent = (
        node(name, vae=vae, pixels=pixels, **options)[0]["samples"] for vae in (stock, fast)
    )
    assert relative_error(latent, expected) <= 1e-5


def test_images_are_encoded_as_a_video_or_separately(family):
    pixels = frames(3)
    expected = torch.cat([family.stock.encode(image[None]) for image in pixels])
    assert expected.shape == (3, 16, 1, 4, 6)
    for latent in (
        family.fast.encode(pixels, not_video=True),
        family.fast.encode(pixels[:, None]),  # [B, T, H, W, C]
        ours("Encode", vae=family.fast, pixels=pixels, batch="images").args[0]["samples"],
    ):
        assert relative_error(latent, expected) <= 1e-5
    videos = torch.stack([frames(5), frames(5, seed=1)])
    expected = torch.cat([family.stock.encode(video) for video in videos])
    assert relative_error(family.fast.encode(videos), expected) <= 1e-5


def test_bfloat16_is_as_accurate_as_stock(seedvr2, tmp_path):
    rough = narrow_seedvr2(seedvr2.state, dtype=torch.bfloat16)
    fast = fast_vae(seedvr2.state, tmp_path, dtype=torch.bfloat16)
    for name, given in (("decode", small_latents(2)), ("encode", frames(5))):
        expected = getattr(seedvr2.stock, name)(given)
        allowed = 2 * relative_error(getattr(rough, name)(given), expected)
        assert relative_error(getattr(fast, name)(given), expected) <= allowed


def test_conditionings_of_a_video_equal_stock(stock, fast):
    empty = [[torch.zeros(1, 1, 8), {}]]
    size = {"width": 64, "height": 48, "length": 9, "batch_size": 1}
    inputs = {"positive": empty, "negative": empty, "start_image": clip(1), **size}
    expected, result = (
        v3_node("nodes_wan", "WanImageToVideo", vae=vae, **inputs) for vae in (stock, fast)
    )
    wanted, given = (each[0][0][1]["concat_latent_image"] for each in (expected, result))
    assert relative_error(given, wanted) <= 1e-5
    assert result[2]["samples"].shape == expected[2]["samples"].shape


def test_encode_for_inpaint_equals_stock(stock, fast):
    mask = torch.zeros(1, 70, 66)
    mask[:, 20:40, 20:40] = 1
    inputs = {"pixels": clip(1, 70, 66), "mask": mask, "grow_mask_by": 6}
    (expected,) = node("VAEEncodeForInpaint", vae=stock, **inputs)
    (result,) = node("VAEEncodeForInpaint", vae=fast, **inputs)
    assert relative_error(result["samples"], expected["samples"]) <= 1e-5
    assert torch.equal(result["noise_mask"], expected["noise_mask"])


def test_a_saved_vae_equals_the_loaded_one(family):
    for vae in (family.fast, accelerated(family.stock)):
        weights = vae.get_sd()
        assert weights.keys() == family.stock.get_sd().keys() == family.state.keys()
        assert all(weights[key].is_contiguous() for key in weights)
        assert all(torch.equal(weights[key], family.state[key]) for key in weights)


def test_a_copy_for_another_device_is_fast_and_complete(family):
    fast, latent = family.fast, small_latents(2)
    (selected,) = v3_node("nodes_multigpu", "SelectVAEDeviceNode", vae=fast, device="default")
    assert selected is not fast
    assert torch.equal(selected.decode(latent), fast.decode(latent))
    clone = fast.patcher.deepclone_multigpu(new_load_device=torch.device("cpu"))
    assert type(clone.model) is type(fast.first_stage_model)
    assert clone.model is not fast.first_stage_model
    moved = copy.copy(fast)
    moved.patcher, moved.first_stage_model = clone, clone.model
    assert torch.equal(moved.decode(latent), fast.decode(latent))
    # SeedVR2's is scaled, by the network that there is then.
    assert torch.equal(moved.encode(frames(5)), fast.encode(frames(5)))


def test_attributes_equal_those_of_stock(family):
    stock, fast = family.stock, family.fast
    assert_same_numbers(fast, stock)
    wan, seedvr2 = ("conv_out_channels", "crop_input"), ("disable_offload", "extra_1d_channel")
    for name in wan if family.name == "wan2.1" else (*seedvr2, "handles_tiling"):
        assert getattr(fast, name) == getattr(stock, name), name
    for name in ("upscale_ratio", "downscale_ratio"):
        given, wanted = getattr(fast, name), getattr(stock, name)
        assert given[1:] == wanted[1:]
        assert [given[0](count) for count in range(30)] == [wanted[0](count) for count in range(30)]
    assert fast.spacial_compression_encode() == stock.spacial_compression_encode() == 8
    assert fast.temporal_compression_decode() == stock.temporal_compression_decode() == 4
    image = frames(1)
    assert torch.equal(fast.process_input(image), stock.process_input(image))
    assert torch.equal(fast.process_output(image.clone()), stock.process_output(image.clone()))
    assert not fast.is_dynamic()


def test_memory_estimates_grow_with_the_size_and_on_a_gpu_but_not_with_the_length(family):
    """ComfyUI asks before it brings the weights there; on a GPU the steps are longer."""
    fast, dtype = family.fast, torch.float32
    on_gpu = copy.copy(fast)
    on_gpu.device = torch.device("cuda", 0)
    for name, scale in (("memory_used_decode", 1), ("memory_used_encode", 8)):
        estimate, there = getattr(fast, name), getattr(on_gpu, name)
        shape = (1, 16, 3 * scale, 60 * scale, 104 * scale)
        longer = (1, 16, 300 * scale, 60 * scale, 104 * scale)
        larger = (1, 16, 3 * scale, 120 * scale, 208 * scale)
        assert 0 < estimate(shape, dtype) == estimate(longer, dtype) < estimate(larger, dtype)
        assert there(longer, dtype) > estimate(longer, dtype) or family.name == "seedvr2"
    assert fast.memory_used_decode((1, 16, 8, 8), dtype) > 0  # no time dimension


def test_comfyui_s_own_methods_work_on_the_fast_network(family):
    import comfy.sd

    core, fast, stock = comfy.sd.VAE, family.fast, family.stock
    assert fast.first_stage_model.comfy_has_chunked_io
    assert fast.handles_tiling
    for count, tiles in (
        (1, {"tile_x": 512, "tile_y": 512, "overlap": 64}),
        (3, {"tile_x": 64, "tile_y": 64, "overlap": 16}),
    ):
        latent, pixels = small_latents(count), frames(4 * count - 3)
        expected = stock.decode(latent)
        for images in (core.decode(fast, latent), core.decode_tiled(fast, latent, **tiles)):
            assert relative_error(images, expected) <= 1e-5
        expected = stock.encode(pixels)
        assert relative_error(core.encode(fast, pixels), expected) <= 1e-5
        assert relative_error(core.encode_tiled(fast, pixels, **tiles), expected) <= 1e-5


def test_an_output_buffer_can_have_any_dtype_and_strides(family):
    model, latent = family.fast.first_stage_model, small_latents(2)
    expected = model.decode(latent)
    assert expected.shape == model.decode_output_shape(latent.shape)
    for buffer in (
        torch.full(expected.shape, torch.nan),
        torch.full((*expected.shape[:2], *expected.shape[:1:-1]), torch.nan).permute(0, 1, 4, 3, 2),
        torch.full(expected.shape, torch.nan, dtype=torch.float16),
    ):
        model.decode(latent, output_buffer=buffer)
        assert torch.equal(buffer, expected.to(buffer.dtype))


def test_latents_of_images_need_no_time_dimension(stock, fast):
    latent = latents(1, batch=3)
    expected = stock.decode(latent)[:, 0]
    assert relative_error(fast.decode(latent[:, :, 0]), expected) <= 1e-5
    model = fast.first_stage_model
    assert model.decode_output_shape((3, 16, 6, 9)) == (3, 3, 48, 72)
    assert torch.equal(model.decode(latent[:, :, 0]), model.decode(latent)[:, :, 0])


def test_unknown_options_are_passed_to_comfyui_s_method(fast, monkeypatch):
    import comfy.sd

    seen = {}
    monkeypatch.setattr(
        comfy.sd.VAE, "decode", lambda self, samples, options, **newer: seen.update(newer)
    )
    fast.decode(latents(1), something_new=3)
    assert seen == {"something_new": 3}


def test_the_requested_output_dtype_is_used(fast, monkeypatch):
    from comfy.cli_args import args

    latent = latents(2)
    expected = fast.decode(latent)
    monkeypatch.setattr(args, "fp16_intermediates", True)
    images = fast.decode(latent)
    assert images.dtype == torch.float16
    assert (images - expected).abs().max() < 1e-3
    assert fast.encode(clip(5)).dtype == torch.float16


def test_a_patch_applies_as_in_stock_and_is_removed(family):
    generator = torch.Generator().manual_seed(3)
    patches = {
        key: ("diff", (torch.randn(family.state[key].shape, generator=generator) * 0.05,))
        for key in family.keys
    }
    latent = small_latents(2)
    plain = family.fast.decode(latent)
    patched, patched_stock = copy.copy(family.fast), copy.copy(family.stock)
    for vae in (patched, patched_stock):
        vae.patcher = vae.patcher.clone()
        assert sorted(vae.patcher.add_patches(patches)) == sorted(patches)
    changed = patched.decode(latent)
    assert relative_error(changed, patched_stock.decode(latent)) <= 1e-5
    assert (changed - plain).abs().max() > 1e-3
    assert torch.equal(family.fast.decode(latent), plain)
    assert torch.equal(patched.decode(latent), changed)
    family.stock.decode(latent)  # without the patch again


WIDTH = 8


def test_the_layered_vae_with_alpha_equals_stock(tmp_path):
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


def test_a_decoder_only_vae_decodes_like_stock_and_refuses_to_encode(family, tmp_path):
    fast, latent = fast_vae(decoder_of(family.state), tmp_path), latents(2, 4, 6)
    assert relative_error(fast.decode(latent), family.stock.decode(latent)) <= 1e-5
    with pytest.raises(ValueError, match="has no encoder"):
        fast.encode(clip(1))
    for name, given in (("Encode", {"pixels": clip(1)}), ("EncodeVideo", {"video": held(clip(1))})):
        with pytest.raises(ValueError, match=r"^vae: the checkpoint has no encoder"):
            ours(name, vae=fast, **given)


def test_a_2x_decoder_gives_images_of_twice_the_size(tmp_path):
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


def test_stages_of_any_width_load_where_comfyui_s_class_does_not_fit(family, tmp_path):
    if family.name == "seedvr2":
        other = random_seedvr2((32, 32, 64, 64), (64, 32, 96, 96), seed=1)
        first = "encoder."
    else:
        other = random_state_dict(12)
        first = ("encoder.", "conv1.")
    own = {key: value for key, value in family.state.items() if key.startswith(first)}
    fast, pixels = fast_vae(other | own, tmp_path), clip(5, 32, 48)
    assert relative_error(fast.encode(pixels), family.stock.encode(pixels)) <= 1e-5
    decoded = fast.decode(latents(2, 4, 6))
    assert decoded.shape == (1, 5, 32, 48, 3)
    if family.name != "seedvr2":  # ComfyUI's class does not support these widths
        assert relative_error(decoded, stock_vae(other).decode(latents(2, 4, 6))) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "state",
    [
        pytest.param(lambda: random_state_dict(96), id="Wan 2.1"),
        pytest.param(lambda: random_seedvr2(WIDTHS), id="SeedVR2"),
        pytest.param(lambda: random_wan22(160, 256), id="Wan 2.2"),
    ],
)
def test_vaes_of_the_published_widths_equal_stock(state):
    stock = stock_vae(state())
    fast = accelerated(stock)
    assert fast is not stock
    assert_same_numbers(fast, stock)
    latent, pixels = latents(2, 2, 2, channels=stock.latent_channels), clip(5, 32, 32)
    assert relative_error(fast.decode(latent), stock.decode(latent)) <= 1e-5
    assert relative_error(fast.encode(pixels), stock.encode(pixels)) <= 1e-5


def test_a_narrow_wan_2_2_loads_where_comfyui_s_class_does_not_fit(tmp_path):
    from fast_video_vae.tests.benchmarks.peers import comfyui_vae

    state = random_wan22(8, 16)
    fast, network = fast_vae(state, tmp_path), comfyui_vae(state).module
    latent = latents(3, 3, 4, channels=48)
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


def test_qwen_image_2_1_encodes_images_separately(picture_vae):
    from fast_video_vae.tests.benchmarks.peers import diffusers_vae

    fast, peer = picture_vae, diffusers_vae(picture_vae.get_sd())
    assert (fast.latent_dim, fast.latent_channels, fast.output_channels) == (2, 64, 4)
    assert fast.spacial_compression_decode() == 16
    assert fast.temporal_compression_decode() is None
    latent = latents(1, 3, 4, batch=2, channels=64)
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
