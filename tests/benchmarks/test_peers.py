"""The peers agree with each other, so each of them can be an oracle."""

import pytest
import torch

from fast_video_vae.tests.benchmarks import peers
from fast_video_vae.tests.builders import random_state_dict


@pytest.fixture(scope="module")
def state():
    return random_state_dict(8)


@pytest.mark.comfyui
@pytest.mark.parametrize("frames", [1, 5])
def test_comfyui_and_diffusers_compute_the_same(state, frames):
    try:
        comfyui, diffusers = peers.comfyui_vae(state), peers.diffusers_vae(state)
    except peers.PeerUnavailableError as missing:
        pytest.skip(str(missing))
    x = torch.rand(2, 3, frames, 48, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    latent = diffusers.encode(x)
    assert latent.shape == (2, 16, (frames + 3) // 4, 6, 8)
    torch.testing.assert_close(comfyui.encode(x), latent, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        comfyui.decode(latent).clamp(-1, 1), diffusers.decode(latent), rtol=0, atol=1e-5
    )


def test_diffusers_classes_for_wan_and_qwen_image_are_equal(state):
    try:
        wan, qwen = peers.diffusers_vae(state), peers.diffusers_vae(state, qwen_image=True)
    except peers.PeerUnavailableError as missing:
        pytest.skip(str(missing))
    x = torch.rand(1, 3, 5, 32, 48, generator=torch.Generator().manual_seed(2)) * 2 - 1
    torch.testing.assert_close(wan.encode(x), qwen.encode(x), rtol=0, atol=1e-5)
