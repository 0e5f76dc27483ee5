"""Previews in a real ComfyUI: the frames of its own tiny decoder, and the node in its server."""

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.server import Workflow
from fast_video_vae.tests.tiny import random_tiny
from fast_video_vae.vae.preview import load_tiny_decoder

pytestmark = pytest.mark.comfyui


def test_the_node_shows_an_animation_in_a_running_comfyui(server):
    workflow = Workflow()
    options = {"decoder": "auto", "fps": 16.0}
    shown = workflow.add("FastVAE_PreviewLatent", samples=workflow.latent(64, 9), **options)
    result = server.run(workflow)[shown[0]]
    (file,) = server.files(result)
    assert result["animated"] == [True]
    assert file.parent.name == "temp"
    assert file.read_bytes()[8:12] == b"WEBP"


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
