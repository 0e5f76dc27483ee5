"""A fast VAE piece by piece, against the IMAGE and the LATENT of ComfyUI's nodes with it."""

import itertools

import pytest
import torch

from fast_video_vae.tests.nodes.vae.pairs import as_saved, clip, fast_vae, latents
from fast_video_vae.tests.nodes.video.clips import assert_encoded, image
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.vae import StreamOptions

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.fixture(scope="module")
def seedvr2_vae(comfyui, tmp_path_factory):
    return fast_vae(random_seedvr2(), tmp_path_factory.mktemp("vae"))


def decoded(vae, latent, **options):
    from fast_video_vae.nodes.video.stream import decode_pictures

    return torch.cat(list(decode_pictures(vae, latent, **options)))


def encoded(vae, pieces, chunk=None, **options):
    from fast_video_vae.nodes.video.stream import encode_video

    return encode_video(vae, lambda: iter(pieces), options=StreamOptions(chunk), **options)


def cut(images, lengths):
    """Pieces `[1, C, n, H, W]` in [-1, 1] of an IMAGE."""
    ends = list(itertools.accumulate(lengths))
    video = (images * 2 - 1).movedim(-1, 0).unsqueeze(0)
    return [video[:, :, end - length : end] for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize(
    ("lengths", "chunk"),
    [
        ([1], None),  # a picture
        ([1, 4], 2),
        ([4, 1], None),  # the first group ends in the second piece
        ([1] * 9, 2),
        ([3, 8, 6], None),
        ([3, 8, 6], 2),
    ],
)
def test_pieces_of_any_length_give_the_same_latent(fast, lengths, chunk):
    images = clip(sum(lengths))
    assert_encoded(encoded(fast, cut(images, lengths), chunk=chunk), fast, images)


@pytest.mark.parametrize("frames", [1, 5])
def test_latents_of_seedvr2_are_scaled_as_in_comfyui(seedvr2_vae, frames):
    images = clip(frames)
    latent = encoded(seedvr2_vae, cut(images, [frames]))
    assert_encoded(latent, seedvr2_vae, images)
    assert torch.equal(decoded(seedvr2_vae, latent), as_saved(image(seedvr2_vae, latent)))


def test_an_encode_out_of_memory_starts_again(fast, monkeypatch):
    from fast_video_vae.nodes.vae.first_stage import FastVideoVAE

    images = clip(17)
    real_stream, calls = FastVideoVAE.encode_stream, []

    def encode_stream(self, pieces, options, **others):
        calls.append(options)
        for latent in real_stream(self, pieces, options, **others):
            yield latent
            if len(calls) < 3:
                raise torch.OutOfMemoryError("out of memory, says the test")

    monkeypatch.setattr(FastVideoVAE, "encode_stream", encode_stream)
    assert_encoded(encoded(fast, cut(images, [5, 12])), fast, images)
    assert [each.tile for each in calls[:2]] == [None, None]
    assert calls[2].tile is not None


def test_the_progress_bar_counts_frames(fast, progress):
    decoded(fast, latents(3), frames=range(2, 8))
    assert progress[-1] == (6, 6)
    encoded(fast, cut(clip(9), [9]), count_estimate=9)
    assert progress[-1] == (3, 3)
    with pytest.raises(ValueError, match="the video has no frames"):
        encoded(fast, [])
