"""Properties of the Wan 2.2 layout; see test_families.py for the rest."""

import pytest
import torch

from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.vae.families import (
    Convolutions,
    random_frames,
    random_latent,
    relative_error,
)
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.models.wan22 import DownStage, UpStage


def test_frames_of_an_image_vae_are_independent():
    pictures = load_vae(random_qwen21(), dtype=torch.float32)
    latent = random_latent(1, 64, 3, 3, 2)
    with Convolutions() as convolutions:
        apart = [pictures.decode(latent[:, :, i : i + 1]) for i in range(3)]
    assert set(convolutions.dimensions) == {4}
    for chunk in (None, 1, 2, -1):
        assert torch.equal(pictures.decode(latent, chunk), torch.cat(apart, dim=2))
    images = random_frames(1, 4, 3, 48, 32)
    apart = [pictures.encode(images[:, :, i : i + 1]) for i in range(3)]
    assert torch.equal(pictures.encode(images), torch.cat(apart, dim=2))


def test_a_pruned_decoder_loads_by_its_shapes():
    # Narrower than its encoder, and by another factor in every stage.
    state, narrow = random_wan22(8, 16), random_wan22(8, 4)
    pruned = {key: (narrow if key.startswith("decoder.") else state)[key] for key in state}
    vae = load_vae(pruned, dtype=torch.float32)
    assert (vae.config.encoder_width, vae.config.decoder_width) == (8, 4)
    peer = diffusers_vae(pruned)
    latent = random_latent(1, 48, 3, 2, 3)
    assert relative_error(vae.decode(latent).clamp(-1, 1), peer.decode(latent)) <= 1e-5


def test_channel_counts_that_do_not_fit_a_shortcut_are_refused():
    with pytest.raises(ValueError, match="16 values for 7 channels"):
        UpStage(7, 4, space=True, time=False, taps=3)
    with pytest.raises(ValueError, match="28 values for 8 channels"):
        DownStage(7, 8, space=True, time=False, taps=3)
