"""Tiny decoders next to ComfyUI's own: the same frames from the same weights."""

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.tiny import random_tiny
from fast_video_vae.vae.preview import load_tiny_decoder

pytestmark = pytest.mark.comfyui


@pytest.mark.parametrize("channels", [16, 48])
def test_frames_are_those_of_comfyuis_network_for_any_chunk(inference, tmp_path, channels):
    from comfy.taesd.taehv import TAEHV

    state = random_tiny(channels, seed=1)
    path = tmp_path / "lighttae.safetensors"
    save_file(state, path)
    decoder = load_tiny_decoder(path, dtype=torch.float32)
    stock = TAEHV(channels).eval()
    missing, unexpected = stock.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(key.startswith("encoder.") for key in missing)
    latent = torch.randn(1, channels, 4, 4, 3, generator=torch.Generator().manual_seed(0))
    for parallel in (True, False):
        stock.parallel = parallel
        expected = stock.decode(latent)
        for chunk in (None, 1, 2, 3, -1):
            assert (decoder.decode(latent, chunk) - expected).abs().max() <= 1e-5
