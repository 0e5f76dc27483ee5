"""A running stream: order of inputs and results, memory, layout, ops, and options."""

import gc
import threading

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.seedvr2 import SCALE, random_seedvr2
from fast_video_vae.tests.vae.families import Convolutions, close, joined
from fast_video_vae.vae import StreamOptions, load_vae, model
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.layers.workspace import Workspace
from fast_video_vae.vae.streaming import session
from fast_video_vae.vae.streaming.executor import rechunk
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


def test_inputs_are_not_changed(vae):
    latent, video = torch.randn(1, 16, 3, 2, 2), torch.rand(1, 3, 9, 16, 16)
    before = latent.clone(), video.clone()
    vae.decode(latent)
    vae.encode(video)
    assert torch.equal(latent, before[0])
    assert torch.equal(video, before[1])


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


def test_frames_have_the_dtype_of_the_stream():
    vae = load_vae(random_state_dict(4), dtype=torch.float32)
    latent = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    rounded = torch.cat(list(vae.decode_stream(latent, StreamOptions(dtype=torch.bfloat16))), dim=2)
    assert rounded.dtype == torch.bfloat16
    expected = vae.decode(latent)
    # About 30 roundings of half a bf16 ulp, one after the other.
    assert (rounded - expected).norm() < 30 * 2**-9 * expected.norm()
    assert vae.dtype == torch.float32


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


def test_seedvr2_latents_equal_the_scaled_mean():
    scaled = load_vae(random_seedvr2(), dtype=torch.float32)
    frames = torch.rand(1, 3, 5, 16, 16) * 2 - 1
    mean = joined(scaled.encode_stream(frames, scaled=False))
    assert torch.equal(mean * SCALE, scaled.encode(frames))
