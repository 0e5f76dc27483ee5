"""The bundled VAE for the tests of the video nodes: codecs are made for pictures as it makes."""

import pytest
import torch

from fast_video_vae.tests.nodes.vae.pairs import ours


@pytest.fixture(scope="session")
def demo(comfyui):
    """The bundled VAE, and a latent of nine frames of the bundled clip: pictures, not noise."""
    with torch.inference_mode():
        (vae,) = ours("Load", vae_name="bundled demo").args
        images = ours("DemoClip").args[0]
        return vae, vae.encode(images[:9, 64:160, 64:160])
