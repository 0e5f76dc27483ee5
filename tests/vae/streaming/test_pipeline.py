"""A running stream: order of inputs and results, memory, layout, ops, and options."""

import gc
import threading

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.vae.families import Convolutions, close, joined
from fast_video_vae.vae import StreamOptions, load_vae, model
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.layers.workspace import Workspace
from fast_video_vae.vae.streaming import session
from fast_video_vae.vae.streaming.executor import rechunk
from fast_video_vae.vae.streaming.part import KeptPieces
from fast_video_vae.vae.streaming.session import VideoSession


@pytest.fixture(scope="module")
def vae():
    return load_vae(random_state_dict(8), dtype=torch.float32)


@pytest.mark.parametrize(
    ("pieces", "size", "expected"),
    [
        ([9], 4, [1, 4, 4]),
        ([9], None, [1, 8]),
        ([1, 1, 1, 1, 1], 4, [1, 4]),
        ([2, 3, 2], 3, [1, 3, 3]),
        ([3, 5], 4, [1, 4, 3]),  # a short tail
        ([1], 4, [1]),
    ],
)
def test_rechunk_yields_the_first_frame_then_equal_runs(pieces, size, expected):
    video = torch.arange(float(sum(pieces))).view(1, 1, -1, 1, 1)
    runs = list(rechunk(video.split(pieces, dim=2), size))
    assert [run.shape[2] for run in runs] == expected
    assert torch.equal(torch.cat(runs, 2), video)


def test_rechunk_of_no_pieces_is_empty():
    assert not list(rechunk(iter([]), 4))


def test_frames_are_yielded_before_later_latents_are_read(vae):
    requested = []

    def latents():
        for index in range(4):
            requested.append(index)
            yield torch.randn(1, 16, 1, 2, 2)

    stream = vae.decode_stream(latents())
    assert requested == []
    seen = 0
    for frames in stream:
        seen += frames.shape[2]
        assert vae.config.latent_frames(seen) >= len(requested)
    assert seen == 13


def test_latents_are_yielded_before_later_frames_are_read(vae):
    requested = 0

    def video():
        nonlocal requested
        for _ in range(13):
            requested += 1
            yield torch.zeros(1, 3, 1, 16, 16)

    made = 0
    for latent in vae.encode_stream(video()):
        made += latent.shape[2]
        assert requested == vae.config.frames(made)
    assert made == 4


def test_a_video_is_never_padded_with_a_copy(vae):
    with Convolutions() as seen:
        vae.decode(torch.randn(1, 16, 3, 2, 2))
        vae.encode(torch.zeros(1, 3, 9, 16, 16))
    assert 5 in seen.dimensions
    assert not [name for name in seen.ops if "pad" in name]


def test_threads_can_share_a_vae(vae):
    vae.drop_derived()
    latents = [torch.randn(1, 16, 3, 2, 2 + index) for index in range(4)]
    expected = [load_vae(vae.state_dict(), dtype=torch.float32).decode(x) for x in latents]
    results = [None] * len(latents)

    def work(index):
        for _ in range(3):
            results[index] = vae.decode(latents[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(latents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, frames in zip(results, expected, strict=True):
        close(result, frames)


@each_value_once(pieces=[None, 2], tile=[None, (64, 64)])
def test_a_finished_or_dropped_stream_frees_its_memory(vae, pieces, tile):
    """Memory is freed at once, not at the next garbage collection."""

    def run():
        for piece, _ in enumerate(vae.decode_stream(latent, StreamOptions(1, tile=tile))):
            if piece == pieces:
                break

    def kept():
        kinds = (TemporalCache, Workspace, VideoSession)
        return [each for each in gc.get_objects() if type(each) in kinds]

    latent = torch.randn(1, 16, 4, 16, 16)
    gc.collect()
    gc.disable()
    try:
        earlier = {id(each) for each in kept()}  # of other tests
        run()
        assert not [each for each in kept() if id(each) not in earlier]
    finally:
        gc.enable()


def test_two_streams_of_one_vae_do_not_mix(vae):
    latents = torch.randn(2, 1, 16, 3, 2, 2).unbind()
    streams = [vae.decode_stream(latent, StreamOptions(chunk=1)) for latent in latents]
    turns = list(zip(*streams, strict=True))
    for latent, frames in zip(latents, zip(*turns, strict=True), strict=True):
        close(torch.cat(frames, 2), vae.decode(latent))


def test_a_stream_limit_applies_to_that_stream_only(vae, monkeypatch):
    limits = []
    real = model.make_plan

    def plan(*arguments, **options):
        limits.append(arguments[1])
        return real(*arguments, **options)

    for module in (model, session):
        monkeypatch.setattr(module, "make_plan", plan)
    latent, frames = torch.randn(1, 16, 3, 2, 2), torch.rand(1, 3, 9, 16, 16)
    expected, encoded = vae.decode(latent), vae.encode(frames)
    for stream, result in (
        (vae.decode_stream(latent, StreamOptions(limit_bytes=1)), expected),
        (vae.encode_stream(frames, StreamOptions(limit_bytes=2)), encoded),
        (vae.encode_stream(frames, StreamOptions(limit_bytes=3), scaled=False), encoded),
    ):
        close(joined(stream), result)
    vae.plan(16, 16, StreamOptions(limit_bytes=4), encode=True)
    assert limits == [None, None, 1, 2, 3, 4]
    monkeypatch.setattr(vae, "limit_bytes", 5)
    joined(vae.decode_stream(latent))
    joined(vae.decode_stream(latent, StreamOptions(limit_bytes=6)))
    assert limits[6:] == [5, 6]


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
