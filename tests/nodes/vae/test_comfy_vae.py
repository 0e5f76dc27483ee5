"""The fast VAE in ComfyUI's nodes, against the VAE that ComfyUI loads from the same weights.

The oracle is ComfyUI itself, in this process: its VAE object, its nodes, its network. At the end
are VAEs of other sizes and key names, also such as ComfyUI does not load.
"""

import copy
import logging

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.kernels import errors
from fast_video_vae.tests.builders import decoder_of, diffusers_name, random_state_dict, refused
from fast_video_vae.tests.nodes.diffusion import random_weights
from fast_video_vae.tests.nodes.vae.pairs import (
    accelerated,
    assert_same,
    clip,
    fast_vae,
    frames,
    latents,
    node,
    ours,
    relative_error,
    small_latents,
    stock_vae,
)
from fast_video_vae.tests.nodes.video.clips import held
from fast_video_vae.tests.vae.checkpoint_io.test_layouts import flat, put

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.mark.parametrize(
    ("name", "batch", "count", "size"),
    [
        ("wan", 3, 1, (4, 6)),  # pictures
        ("wan", 1, 2, (9, 11)),  # 5 frames in tiles of 8 latents, whose last is narrow
        ("seedvr2", 2, 2, (4, 2)),
    ],
)
def test_every_way_to_decode_equals_stock(request, name, batch, count, size):
    family = request.getfixturevalue(name)
    samples = {"samples": latents(count, *size, batch=batch)}
    before = samples["samples"].clone()
    (expected,) = node("VAEDecode", vae=family.stock, samples=samples)
    assert expected.shape == (batch * (4 * count - 3), 8 * size[0], 8 * size[1], 3)
    inputs = {"vae": family.fast, "samples": samples}
    for images in (
        node("VAEDecode", **inputs)[0],
        node("VAEDecodeTiled", **inputs, tile_size=72, overlap=24, temporal_size=8)[0],
        *(ours("Decode", **inputs, chunk=chunk).args[0] for chunk in (1, -1)),
    ):
        assert relative_error(images, expected) <= 1e-5
        assert images.is_contiguous()
        assert images.dtype == torch.float32
        assert 0 <= images.min() <= images.max() <= 1
    assert torch.equal(samples.pop("samples"), before)
    assert not samples


@pytest.mark.parametrize(
    ("name", "count", "channels", "size"),
    [
        ("wan", 1, 3, (8, 8)),  # the smallest
        ("wan", 6, 3, (75, 86)),  # cropped about the centre; in tiles; the last frame is dropped
        ("seedvr2", 3, 4, (16, 25)),  # fewer than a group: one latent; alpha is left out
    ],
)
def test_every_way_to_encode_equals_stock(request, name, count, channels, size):
    family = request.getfixturevalue(name)
    pixels = clip(count, *size, channels)
    before = pixels.clone()
    # ComfyUI does not crop for SeedVR2, whose convolutions see the rest at the right and bottom.
    (top, height), (left, width) = ((side % 8 // 2, side // 8 * 8) for side in size)
    expected = family.stock.encode(pixels[:, top : top + height, left : left + width])
    assert expected.shape == (1, 16, (count - 1) // 4 + 1, height // 8, width // 8)
    inputs = {"vae": family.fast, "pixels": pixels}
    for latent in (
        node("VAEEncode", **inputs)[0],
        node("VAEEncodeTiled", **inputs, tile_size=64, overlap=24, temporal_size=8)[0],
        *(ours("Encode", **inputs, chunk=chunk).args[0] for chunk in (1, -1)),
    ):
        assert relative_error(latent["samples"], expected) <= 1e-5
    assert torch.equal(pixels, before)


def test_batches_are_encoded_one_by_one(wan):
    pixels, videos = frames(2), torch.stack([frames(5), frames(5, seed=1)])
    expected = torch.cat([wan.stock.encode(image[None]) for image in pixels])
    for latent in (
        wan.fast.encode_tiled(pixels, 64, 64, not_video=True),
        ours("Encode", vae=wan.fast, pixels=pixels, batch="images").args[0]["samples"],
    ):
        assert relative_error(latent, expected) <= 1e-5
    expected = torch.cat([wan.stock.encode(video) for video in videos])
    assert relative_error(wan.fast.encode(videos), expected) <= 1e-5  # [B, T, H, W, C]


def test_the_layered_vae_with_alpha_equals_stock(tmp_path):
    state = random_state_dict(8, image_channels=4, out_channels=4)
    stock, fast = stock_vae(state), fast_vae(state, tmp_path)
    layers = {"samples": small_latents(1, batch=2)}  # as from Latent Cut To Batch
    assert_same(*(node("VAEDecode", vae=vae, samples=layers) for vae in (fast, stock)))
    for channels in (3, 4):  # without alpha: opaque
        pixels = frames(1, channels=channels)
        assert_same(fast.encode(pixels), stock.encode(pixels))


def test_the_network_works_as_comfyui_s_for_packs_that_call_it(family):
    """SeedVR2's takes time in the channels, and returns unscaled means, a single one flat."""
    theirs, model = family.stock.first_stage_model, family.fast.first_stage_model
    for count in (1, 2):
        clips = [clip(4 * count - 3, 16, 16, seed=seed) for seed in (0, 1)]
        video = torch.stack(clips).movedim(-1, 1) * 2 - 1
        options = {} if count == 1 else {"device": torch.device("cpu")}
        assert_same(model.encode(video, **options), theirs.encode(video))
        latent = latents(count, 2, 2, batch=2)
        assert_same(model.decode(latent), theirs.decode(latent))
    if family.name == "seedvr2":
        flat = latents(3, 2, 2).flatten(1, 2)
        expected = theirs.decode(flat)
        needed = [family.fast.memory_used_decode(x.shape, None) for x in (flat, latents(3, 2, 2))]
        assert needed[0] == needed[1]
    else:
        flat = small_latents(1, batch=3)[:, :, 0]
        expected = theirs.decode(flat[:, :, None])[:, :, 0]
    assert_same(model.decode(flat), expected)
    images = (expected.movedim(1, -1) + 1) / 2
    assert (family.fast.decode(flat) - images.clamp(0, 1)).abs().max() <= 1e-5


def test_an_unknown_option_is_named_in_the_log_and_changes_nothing(fast, monkeypatch, caplog):
    monkeypatch.setattr(errors, "_logged", set())
    latent, pixels, new = latents(2), frames(5), {"something_new": 3}
    tile = {"tile_x": 64, "tile_y": 64, "overlap": 16} | new
    for images in (fast.decode(latent, new), fast.decode_tiled(latent, **tile)):
        assert_same(images, fast.decode(latent))
    assert_same(fast.encode_tiled(pixels, **tile), fast.encode(pixels, **new))
    fast.first_stage_model.decode(latent, **new)
    line = "a fast VAE does not know this option of {}, and ignores it: something_new"
    expected = [line.format("decode"), line.format("encode")]
    assert [text.partition(": ")[2] for text in caplog.messages] == expected


def test_a_tile_has_the_height_and_width_of_the_node(fast, monkeypatch):
    from fast_video_vae.nodes.vae import pieces

    begin, tiles = pieces.begin, []

    def noted(*given, **more):
        options, needed = begin(*given, **more)
        tiles.append(options.tile)
        return options, needed

    monkeypatch.setattr(pieces, "begin", noted)
    fast.decode_tiled(latents(1, 3, 4), tile_x=10, tile_y=8)
    fast.encode_tiled(clip(1, 24, 32), tile_x=80, tile_y=64)
    assert tiles == [(64, 80), (64, 80)]


def test_the_requested_output_dtype_is_used(fast, monkeypatch):
    from comfy.cli_args import args

    expected = fast.decode(small_latents(2))
    monkeypatch.setattr(args, "fp16_intermediates", True)
    images = fast.decode(small_latents(2))
    assert images.dtype == fast.encode(frames(5)).dtype == torch.float16
    assert (images - expected).abs().max() < 1e-3


def test_attributes_and_saved_weights_equal_those_of_stock(family):
    stock, fast, image = family.stock, family.fast, frames(1)
    for vae in (fast, accelerated(stock)):
        weights = vae.get_sd()
        assert weights.keys() == stock.get_sd().keys() == family.state.keys()
        assert all(weights[key].is_contiguous() for key in weights)
        assert all(torch.equal(weights[key], family.state[key]) for key in weights)
    for name in (
        "latent_channels", "latent_dim", "output_channels", "pad_channel_value", "vae_dtype",
        "device", "output_device", "not_video", "upscale_index_formula", "downscale_index_formula",
        "working_dtypes", "conv_out_channels", "extra_1d_channel",
    ):  # fmt: skip
        given = getattr(fast, name)
        assert given == getattr(stock, name, given), name  # not every family has each
    for name in ("upscale_ratio", "downscale_ratio"):
        (given, *sides), (wanted, *expected) = getattr(fast, name), getattr(stock, name)
        assert sides == expected
        assert [given(count) for count in range(30)] == [wanted(count) for count in range(30)]
    assert fast.temporal_compression_decode() == stock.temporal_compression_decode() == 4
    assert torch.equal(fast.process_input(image), stock.process_input(image))
    assert torch.equal(fast.process_output(image.clone()), stock.process_output(image.clone()))
    assert not fast.is_dynamic()


def test_a_patch_applies_as_in_stock_and_is_removed(family):
    generator = torch.Generator().manual_seed(3)
    patches = {
        key: ("diff", (torch.randn(family.state[key].shape, generator=generator) * 0.05,))
        for key in family.keys
    }
    latent = latents(2, 2, 2)
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


def test_files_with_other_keys_and_whole_checkpoints_are_loaded(
    models, state, fast, tmp_path, caplog
):
    import comfy.sd

    expected, path = fast.decode(latents(2)), models / "whole.safetensors"
    renamed = fast_vae({diffusers_name(key): value for key, value in state.items()}, tmp_path)
    assert renamed.get_sd().keys() == state.keys()
    whole = put("model.diffusion_model.", random_weights("wan21-t2v")) | put("vae.", state)
    save_file(whole, path)
    with caplog.at_level(logging.INFO):
        (loaded,) = ours("Load", vae_name=path.name).args
    assert "not of the VAE (model.diffusion_model." in caplog.text
    _, _, vae, _ = comfy.sd.load_checkpoint_guess_config(str(path), output_clip=False)
    for each in (renamed, loaded, accelerated(vae)):
        assert each is not vae
        assert torch.equal(each.decode(latents(2)), expected)


def test_a_decoder_only_vae_decodes_like_stock_and_refuses_to_encode(family, tmp_path):
    fast, latent = fast_vae(decoder_of(family.state), tmp_path), latents(1, 2, 2)
    assert relative_error(fast.decode(latent), family.stock.decode(latent)) <= 1e-5
    with pytest.raises(ValueError, match="has no encoder"):
        fast.encode(clip(1, 16, 16))
    for name, given in (
        ("Encode", {"pixels": clip(1, 16, 16)}),
        ("EncodeVideo", {"video": held(clip(1, 16, 16))}),
    ):
        with refused(r"^vae: the checkpoint has no encoder"):
            ours(name, vae=fast, **given)


def test_a_2x_decoder_gives_images_of_twice_the_size(tmp_path):
    state, latent = random_state_dict(8, out_channels=12), latents(2)
    fast, stock = fast_vae(state, tmp_path), stock_vae(state)
    # ComfyUI leaves the phases of the pixels in channels.
    phases = stock.decode(latent)[0].movedim(-1, 1)
    expected = torch.nn.functional.pixel_shuffle(phases, 2).movedim(1, -1)
    assert expected.shape == (5, 96, 144, 3)
    (tiled,) = node("VAEDecodeTiled", vae=fast, samples={"samples": latent}, tile_size=64)
    for each in (node("VAEDecode", vae=fast, samples={"samples": latent})[0], tiled):
        assert relative_error(each, expected) <= 1e-5
    assert fast.spacial_compression_decode() == 16
    assert fast.encode(clip(1)).shape == (1, 16, 1, 8, 8)


def assert_of_images(vae, images, one, pixels, encoded):
    """Check that a VAE decodes images `[B, C, h, w]`, also with time, and encodes each alone."""
    assert (vae.latent_dim, vae.temporal_compression_decode()) == (2, None)
    later = torch.cat([one, -one], 2) if vae.latent_channels == 64 else one  # is left out
    for samples in (one, one[:, :, 0], later):
        given = {"vae": vae, "samples": {"samples": samples}}
        assert_same(node("VAEDecode", **given), [images])
        assert_same(node("VAEDecodeTiled", **given, tile_size=64), [images])
    for found in (vae.encode(pixels), ours("Encode", pixels=pixels, vae=vae).args[0]["samples"]):
        assert_same(found, encoded[:, :, 0])


def test_qwen_image_2_1_is_a_vae_of_images(picture_vae):
    from fast_video_vae.tests.benchmarks.peers import diffusers_vae

    peer, one = diffusers_vae(picture_vae.get_sd()), latents(1, 3, 5, batch=2, channels=64)
    pixels = clip(2, 48, 64, channels=4)
    images = peer.decode(one)[:, :, 0].movedim(1, -1).add(1).div(2)
    encoded = peer.encode(pixels.movedim(-1, 1)[:, :, None] * 2 - 1)
    assert_of_images(picture_vae, images, one, pixels, encoded)
    assert (picture_vae.output_channels, picture_vae.spacial_compression_decode()) == (4, 16)
    opaque = torch.nn.functional.pad(pixels[..., :3], (0, 1), value=1.0)
    assert torch.equal(picture_vae.encode(pixels[..., :3]), picture_vae.encode(opaque))


def test_a_vae_of_single_frames_is_one_of_images_and_refuses_a_video(models, state, fast):
    save_file({k: v.contiguous() for k, v in flat(state).items()}, models / "flat.safetensors")
    (vae,) = ours("Load", vae_name="flat.safetensors").args
    one, pixels = latents(1, batch=2), clip(2)
    encoded = torch.cat([fast.encode(each[None]) for each in pixels])
    for each in (vae, accelerated(vae, chunk=2)):
        assert_of_images(each, fast.decode(one)[:, 0], one, pixels, encoded)
    samples = {"samples": latents(2)}
    for call in (
        lambda: vae.encode(pixels[None]),
        lambda: ours("Decode", vae=vae, samples=samples),
        lambda: ours("DecodeVideo", vae=vae, samples=samples),
    ):
        with refused("frames; expected 1: the weights of this VAE are of single frames"):
            call()
