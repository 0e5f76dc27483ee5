"""What is particular to the Wan 2.1 layout; see test_families.py for the rest."""

import pytest
import torch

from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import random_frames, random_latent, relative_error
from fast_video_vae.vae import load_vae


@pytest.mark.parametrize(
    ("width", "qwen_image", "frames", "batch"),
    [
        (96, False, 5, 1),  # the published width
        *(pytest.param(96, False, *row, marks=pytest.mark.slow) for row in [(1, 3), (17, 3)]),
        (8, True, 13, 1),
    ],
)
def test_equals_diffusers(width, qwen_image, frames, batch):
    weights = random_state_dict(width)
    vae = load_vae(weights, dtype=torch.float32)
    peer = diffusers_vae(weights, qwen_image=qwen_image)
    video = random_frames(batch, 3, frames, 16, 24)
    expected = peer.encode(video)
    assert relative_error(vae.encode(video), expected) <= 1e-5
    # diffusers clamps what it decodes
    actual = vae.decode(expected)
    assert relative_error(actual.clamp(-1, 1), peer.decode(expected).clamp(-1, 1)) <= 1e-5


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


def test_decode_does_not_clamp():
    state = random_state_dict(8)
    brighter = state | {"decoder.head.2.bias": state["decoder.head.2.bias"] + 3}
    assert load_vae(brighter).decode(random_latent(1, 16, 1, 2, 2)).max() > 2
