"""The latents of an iterable, kept as long as they may be needed again."""

import torch

from fast_video_vae.tests.vae.families import joined
from fast_video_vae.vae.streaming.part import KeptLatents


def test_an_iterable_keeps_the_latents_that_the_next_frame_needs():
    """Their number does not grow with the video."""
    latents = KeptLatents(iter(torch.arange(12.0).view(1, 1, 12, 1, 1).split([3, 1, 4, 4], dim=2)))
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
    latents = KeptLatents(iter(torch.arange(4.0).view(1, 1, 4, 1, 1).split(1, dim=2)))
    assert next(latents).item() == 0
    assert latents.first().item() == 1  # seen, not taken
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    assert joined(latents.again(0)[1]).flatten().tolist() == [0, 1, 2, 3]
