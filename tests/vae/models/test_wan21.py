"""What is particular to the Wan 2.1 layout; see test_families.py for the rest."""

import pytest
import torch

from fast_video_vae.tests.benchmarks.peers import (
    PeerUnavailableError,
    comfyui_vae,
    diffusers_vae,
)
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.vae import load_vae


def relative_error(actual, expected):
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def random_frames(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def random_latent(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def state():
    return random_state_dict(8)


@pytest.mark.parametrize(
    ("frames", "batch"),
    [(5, 1), *(pytest.param(*row, marks=pytest.mark.slow) for row in [(1, 3), (9, 1), (17, 3)])],
)
def test_the_published_width_equals_diffusers(frames, batch):
    weights = random_state_dict(96)
    vae, peer = load_vae(weights, dtype=torch.float32), diffusers_vae(weights)
    video = random_frames(batch, 3, frames, 16, 8)
    expected = peer.encode(video)
    assert relative_error(vae.encode(video), expected) <= 1e-5
    # diffusers clamps what it decodes
    actual = vae.decode(expected)
    assert relative_error(actual.clamp(-1, 1), peer.decode(expected).clamp(-1, 1)) <= 1e-5


@pytest.mark.parametrize("frames", [1, 13])
def test_equals_diffusers_qwen_image(state, frames):
    vae = load_vae(state, dtype=torch.float32)
    peer = diffusers_vae(state, qwen_image=True)
    video = random_frames(1, 3, frames, 32, 48)
    expected = peer.encode(video)
    assert relative_error(vae.encode(video), expected) <= 1e-5
    actual = vae.decode(expected).clamp(-1, 1)
    assert relative_error(actual, peer.decode(expected).clamp(-1, 1)) <= 1e-5


@pytest.mark.comfyui
@pytest.mark.parametrize(
    ("width", "image_channels", "out_channels"),
    [
        (8, 3, 3),
        (24, 3, 3),  # LightVAE
        (8, 4, 4),  # Qwen-Image-Layered
    ],
)
def test_equals_comfyui(width, image_channels, out_channels):
    state = random_state_dict(width, image_channels=image_channels, out_channels=out_channels)
    try:
        peer = comfyui_vae(state)
    except PeerUnavailableError as error:
        pytest.skip(str(error))
    vae = load_vae(state, dtype=torch.float32)
    for frames in (1, 5, 17):
        video = random_frames(1, image_channels, frames, 24, 40)
        expected = peer.encode(video)
        assert relative_error(vae.encode(video), expected) <= 1e-5
        # not clamped, neither here nor there
        assert relative_error(vae.decode(expected), peer.decode(expected)) <= 1e-5


def test_a_2x_decoder_shuffles_its_channels_into_pixels():
    state = random_state_dict(8, out_channels=12)
    vae = load_vae(state, dtype=torch.float32)
    assert vae.config.output_scale == 2
    latent = random_latent(2, 16, 3, 3, 2)
    peer = diffusers_vae(state)
    twelve = peer.decode(latent)
    expected = torch.nn.functional.pixel_shuffle(twelve.movedim(2, 1), 2).movedim(1, 2)
    actual = vae.decode(latent)
    assert actual.shape == (2, 3, 9, 48, 32)
    assert relative_error(actual.clamp(-1, 1), expected) <= 1e-5
    assert vae.encode(random_frames(1, 3, 5, 16, 16)).shape == (1, 16, 2, 2, 2)


def test_decode_does_not_clamp(state):
    brighter = state | {"decoder.head.2.bias": state["decoder.head.2.bias"] + 3}
    assert load_vae(brighter).decode(random_latent(1, 16, 1, 2, 2)).max() > 2


def test_frames_five_and_six_show_no_jump(state):
    """A split in front of the temporal upsampling that loses one frame of history shows here."""
    vae = load_vae(state, dtype=torch.float32)
    latent = random_latent(1, 16, 1, 2, 2).expand(-1, -1, 4, -1, -1)
    expected = diffusers_vae(state).decode(latent)
    for chunk in (1, 2, 3):
        actual = vae.decode(latent, chunk=chunk).clamp(-1, 1)
        torch.testing.assert_close(actual[:, :, 4:7], expected[:, :, 4:7], rtol=1e-4, atol=1e-5)
