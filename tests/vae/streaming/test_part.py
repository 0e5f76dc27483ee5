"""A part of a video or of pictures, and the latents that it needs."""

import pytest
import torch

from fast_video_vae.tests.vae.families import STATES, close, joined, latent_for
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.streaming.part import KeptPieces


@pytest.mark.parametrize(
    ("family", "tile"),
    [*((family, None) for family in STATES), ("wan2.2", (32, 32)), ("qwen-image-2.1", (32, 32))],
)
def test_a_part_from_any_frame_on_is_that_of_the_whole(family, tile):
    vae = load_vae(STATES[family](), dtype=torch.float32)
    latent = latent_for(vae, 6, 32, 48)
    options = StreamOptions(1, tile=tile)
    whole = joined(vae.decode_stream(latent, options))
    step = vae.config.temporal_compression
    for start in range(0, whole.shape[2], 2 * step - 1):
        frames = range(start, min(start + step + 1, whole.shape[2]))
        for source in (latent, latent.split(3, dim=2)):
            part = joined(vae.decode_stream(source, options, frames=frames))
            close(part, whole[:, :, frames.start : frames.stop])


def test_an_iterable_keeps_the_latents_that_the_next_frame_needs():
    """Their number does not grow with the video."""
    latents = KeptPieces(iter(torch.arange(12.0).view(1, 1, 12, 1, 1).split([3, 1, 4, 4], dim=2)))
    assert [next(latents).shape[2] for _ in range(3)] == [3, 1, 4]
    latents.release(2)
    assert latents.again(2)[0] == 2
    latents.release(5)
    start, rest = latents.again(5)
    assert start == 5
    assert joined(rest).flatten().tolist() == list(range(5, 12))


def test_a_latent_whose_copy_does_not_fit_is_kept_on_the_host(monkeypatch):
    clone = torch.Tensor.clone

    def full(x, *args, **kwargs):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.Tensor, "clone", full)
    latents = KeptPieces(iter(torch.arange(4.0).view(1, 1, 4, 1, 1).split(1, dim=2)))
    assert next(latents).item() == 0
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    assert joined(latents.again(0)[1]).flatten().tolist() == [0, 1, 2, 3]
