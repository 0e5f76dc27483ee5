"""VAEs of other sizes and key names: what ComfyUI loads too, and what it does not."""

import pytest
import torch

from fast_video_vae.tests.builders import decoder_of, diffusers_name, random_state_dict
from fast_video_vae.tests.nodes.vae.pairs import (
    accelerated,
    assert_same_numbers,
    clip,
    fast_vae,
    latents,
    node,
    ours,
    relative_error,
    stock_vae,
)
from fast_video_vae.tests.nodes.video.clips import held
from fast_video_vae.tests.seedvr2 import WIDTHS, random_seedvr2
from fast_video_vae.tests.wan22 import random_wan22

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

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
