"""SeedVR2's VAE in ComfyUI: its latents, its nodes, and whole frames only."""

import functools

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes import dits
from fast_video_vae.tests.nodes.vae.pairs import (
    clip,
    frames,
    latents,
    narrow_seedvr2,
    node,
    ours,
    relative_error,
    small_latents,
    v3_node,
)
from fast_video_vae.tests.seedvr2 import seedvr2_shapes
from fast_video_vae.tests.vae.streaming.failing_memory import FailingMemory
from fast_video_vae.vae import StreamOptions

LEAST = StreamOptions(limit_bytes=1)

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.fixture(scope="module")
def stock(seedvr2):
    return seedvr2.stock


@pytest.fixture(scope="module")
def loaded(seedvr2):
    return seedvr2.fast


def test_weights_have_the_names_and_shapes_of_comfyui_s_class():
    import comfy.ldm.seedvr.vae as theirs

    with torch.device("meta"):
        weights = theirs.VideoAutoencoderKLWrapper().state_dict()
    assert {key: tuple(value.shape) for key, value in weights.items()} == seedvr2_shapes()


def test_a_tiled_decode_has_no_seams(stock, loaded):
    # Tiles of 64 pixels, which ComfyUI feathers; ours are not cut.
    latent, pixels = latents(2, 4, 16), clip(5, 32, 128)
    expected = stock.decode(latent)
    tiles = {"tile_x": 8, "tile_y": 8, "overlap": 2}
    assert (stock.decode_tiled(latent, **tiles) - expected).abs().max() > 1e-2
    assert relative_error(loaded.decode_tiled(latent, **tiles), expected) <= 1e-5
    expected = stock.encode(pixels)
    tiles = {"tile_x": 64, "tile_y": 64, "overlap": 16}
    assert (stock.encode_tiled(pixels, **tiles) - expected).abs().max() > 1e-2
    assert relative_error(loaded.encode_tiled(pixels, **tiles), expected) <= 1e-5


@pytest.mark.parametrize("count", [1, 2])
def test_a_latent_with_time_in_the_channels_is_decoded_as_a_video(stock, loaded, count):
    latent = small_latents(count, batch=2)
    flat = latent.reshape(2, 16 * count, 4, 6)
    expected, images = stock.decode(flat), loaded.decode(latent)
    assert relative_error(images, expected) <= 1e-5
    assert torch.equal(loaded.decode(flat), images)
    assert torch.equal(loaded.decode_tiled(flat, tile_x=64, tile_y=64, overlap=16), images)
    needed = [loaded.memory_used_decode(x.shape, torch.float32) for x in (flat, latent)]
    assert needed[0] == needed[1]


@pytest.mark.parametrize("is_batch", [False, True])
def test_other_sizes_are_center_cropped(stock, loaded, is_batch):
    import comfy.sd

    pixels = frames(6, 37, 54)
    # ComfyUI leaves the rest, at the right and the bottom, to SeedVR2's convolutions: latents of
    # the same number that are up to half a latent off the centre, and whose last ones see it.
    expected = stock.encode(pixels[:, 2:34, 3:51])
    assert expected.shape == stock.encode(pixels).shape
    given = pixels[None] if is_batch else pixels
    for latent in (
        loaded.encode(given),
        loaded.encode_tiled(given, tile_x=512, tile_y=512, overlap=64),
        comfy.sd.VAE.encode(loaded, given),
        comfy.sd.VAE.encode_tiled(loaded, given, tile_x=512, tile_y=512, overlap=64),
    ):
        assert relative_error(latent, expected) <= 1e-5


@pytest.mark.parametrize("count", [1, 4])
def test_comfyui_s_nodes_of_seedvr2_work_with_the_fast_vae(stock, loaded, count):
    patcher = dits.patcher("seedvr2")
    network = patcher.model.diffusion_model
    generator = torch.Generator().manual_seed(2)
    for name, length in (("positive_conditioning", 5), ("negative_conditioning", 4)):
        setattr(network, name, torch.randn(length, 24, generator=generator))
    source = frames(count, 30, 44, channels=4)  # not of the 16 pixels that the nodes pad to

    def upscaled(vae):
        pixels, *_ = v3_node("nodes_seedvr", "SeedVR2Preprocess", resized_images=source)
        assert pixels.shape == (1, 1 if count == 1 else 5, 32, 48, 3)
        (latent,) = node("VAEEncode", vae=vae, pixels=pixels)
        positive, _ = v3_node(
            "nodes_seedvr", "SeedVR2Conditioning", model=patcher, vae_conditioning=latent
        )
        ((context, options),) = positive
        noise = small_latents(latent["samples"].shape[2], seed=5)
        step = network(
            noise,
            torch.tensor([600.0]),
            context,
            condition=options["condition"],
            transformer_options={"cond_or_uncond": [0]},
        )
        assert step.shape == noise.shape
        (images,) = node("VAEDecode", vae=vae, samples={"samples": noise - 0.6 * step})
        return images

    assert relative_error(upscaled(loaded), upscaled(stock)) <= 1e-5


@pytest.mark.parametrize("count", [1, 5])
def test_the_network_has_unscaled_means_and_scaled_latents_like_stock(stock, loaded, count):
    model, theirs = loaded.first_stage_model, stock.first_stage_model
    video = torch.stack([frames(count), frames(count, seed=1)]).movedim(-1, 1) * 2 - 1
    expected, means = theirs.encode(video), model.encode(video)
    assert relative_error(means, expected) <= 1e-5
    assert torch.equal(model.encode(video, device=torch.device("cpu")), means)
    wanted = theirs.comfy_format_encoded(expected)
    assert relative_error(model.comfy_format_encoded(means), wanted) <= 1e-5
    tiled = theirs.encode_tiled(video, tile_x=512, tile_y=512, overlap=64)
    for result in (model.encode_tiled(video, tile_x=512, tile_y=512), model.encode_tiled(video)):
        assert relative_error(result, tiled) <= 1e-5
    latent = torch.cat(list(model.encode_stream(model.whole_groups(video))), dim=2)
    assert relative_error(latent, wanted) <= 1e-5
    expected, images = theirs.decode(latent), model.decode(latent)
    assert relative_error(images, expected) <= 1e-5
    for given in (latent, latent.flatten(1, 2)):
        assert torch.equal(model.decode(given), images)
        assert relative_error(model.decode_tiled(given, 8, 8, 2), expected) <= 1e-5
        assert model.decode_output_shape(given.shape) == expected.shape


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_seedvr2_goes_on_without_tiles(loaded, monkeypatch, caplog, encode):
    name, given = ("encode", frames(5)) if encode else ("decode", small_latents(2))
    expected, model = getattr(loaded, name)(given), loaded.first_stage_model
    kind, asked = type(model), []
    real = getattr(kind, f"{name}_stream")
    noted = lambda *a, **k: asked.append(a[2]) or real(*a, **k)  # noqa: E731
    monkeypatch.setattr(kind, f"{name}_stream", noted)
    side = 320 if encode else 40
    tiled = getattr(loaded, f"{name}_tiled")
    call = functools.partial(tiled, given, tile_x=side, tile_y=side)
    with FailingMemory() as memory:
        call()
    with FailingMemory(memory.seen // 2):
        assert relative_error(call(), expected) <= 1e-5
    limit = model.plan(320, 320, LEAST, encode=encode).peak_bytes
    assert {(options.tile, options.limit_bytes) for options in asked} == {(None, limit)}
    assert "memory ran out in a" in caplog.text
    assert "tiles of" not in caplog.text


def test_the_loader_recognises_seedvr2_by_its_tensors(models, seedvr2):
    half = {key: value.half() for key, value in seedvr2.state.items()}
    save_file({f"vae.{key}": value for key, value in half.items()}, models / "seed.safetensors")
    vae = ours("Load", vae_name="seed.safetensors", dtype="fp32").args[0]
    assert vae.first_stage_model.config.family == "seedvr2"
    rounded = narrow_seedvr2(half)
    assert relative_error(vae.decode(small_latents(2)), rounded.decode(small_latents(2))) <= 1e-5


def test_the_error_of_a_bad_input_names_it(loaded):
    with refused(r"^pixels: .*1 channels; this VAE needs 3"):
        ours("Encode", pixels=torch.zeros(1, 64, 64, 1), vae=loaded)
    with refused("^samples: .*20 channels; this VAE needs 16"):
        ours("Decode", samples={"samples": torch.zeros(1, 20, 8, 8)}, vae=loaded)
    for refuse in (loaded.decode_tiled, loaded.first_stage_model.decode_tiled):
        with refused("20 channels; this VAE needs 16"):
            refuse(torch.zeros(1, 20, 8, 8), tile_x=64, tile_y=64, overlap=16)
