"""VAE files in the wild, through the nodes: next to a diffusion model, and of single frames."""

import logging

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.diffusion import random_weights
from fast_video_vae.tests.nodes.vae.pairs import accelerated, clip, latents, node, ours
from fast_video_vae.tests.vae.checkpoint_io.test_layouts import flat, put

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.fixture(scope="module")
def whole(state):
    """A diffusion model and its VAE, as Load Checkpoint reads them."""
    return put("model.diffusion_model.", random_weights("wan21-t2v")) | put("vae.", state)


@pytest.fixture(scope="module")
def picture_vae(models, state):
    """The VAE of a file with 2D convolutions."""
    save_file({k: v.contiguous() for k, v in flat(state).items()}, models / "flat.safetensors")
    return ours("Load", vae_name="flat.safetensors").args[0]


def test_a_whole_checkpoint_is_loaded_and_accelerated(models, whole, fast, caplog):
    import comfy.sd

    expected = fast.decode(latents(2))
    save_file(whole, models / "whole.safetensors")
    with caplog.at_level(logging.INFO):
        (loaded,) = ours("Load", vae_name="whole.safetensors").args
    assert "not of the VAE (model.diffusion_model." in caplog.text
    assert torch.equal(loaded.decode(latents(2)), expected)
    path = models / "whole.safetensors"
    _, _, vae, _ = comfy.sd.load_checkpoint_guess_config(str(path), output_clip=False)
    quick = accelerated(vae)
    assert quick is not vae
    assert torch.equal(quick.decode(latents(2)), expected)


def test_a_vae_of_single_frames_is_one_of_images(picture_vae, fast):
    vae, one, pixels = picture_vae, latents(1, batch=2), clip(2, 48, 64)
    assert (vae.latent_dim, vae.latent_channels, vae.output_channels) == (2, 16, 3)
    assert vae.temporal_compression_decode() is None
    expected = fast.decode(one)[:, 0]
    for each in (vae, accelerated(vae, chunk=2)):
        for samples in (one, one[:, :, 0]):
            (images,) = node("VAEDecode", vae=each, samples={"samples": samples})
            assert torch.equal(images, expected)
    encoded = torch.cat([fast.encode(each[None]) for each in pixels])
    for found in (vae.encode(pixels), ours("Encode", pixels=pixels, vae=vae).args[0]["samples"]):
        assert torch.equal(found, encoded[:, :, 0])


def test_a_vae_of_single_frames_refuses_a_video(picture_vae):
    video, samples = clip(5, 48, 64), {"samples": latents(2)}
    for call in (
        lambda: picture_vae.encode(video[None]),
        lambda: picture_vae.decode(samples["samples"]),
        lambda: node("VAEDecode", vae=picture_vae, samples=samples),
        lambda: node("VAEDecodeTiled", vae=picture_vae, samples=samples, tile_size=512),
        lambda: ours("Decode", vae=picture_vae, samples=samples),
        lambda: ours("DecodeVideo", vae=picture_vae, samples=samples),
    ):
        with refused("frames; expected 1: the weights of this VAE are of single frames"):
            call()
