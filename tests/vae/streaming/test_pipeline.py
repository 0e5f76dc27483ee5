"""A running stream: order of inputs and results, memory, layout, ops, and options."""

import gc
import threading

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import STATES, close, random_frames
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.temporal_cache import TemporalCache, Workspace
from fast_video_vae.vae.streaming.session import VideoSession


@pytest.fixture(scope="module")
def vae():
    return load_vae(random_state_dict(8), dtype=torch.float32)


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


def test_threads_can_share_a_vae(vae):
    vae.drop_derived()
    latents = [torch.randn(1, 16, 3, 2, 2 + index) for index in range(3)]
    expected = [load_vae(vae.state_dict(), dtype=torch.float32).decode(x) for x in latents]
    results = [None] * len(latents)

    def work(index):
        for _ in range(2):
            results[index] = vae.decode(latents[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(latents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, frames in zip(results, expected, strict=True):
        close(result, frames)


@pytest.mark.parametrize(("pieces", "tile"), [(None, None), (2, (64, 64))])
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


@pytest.mark.parametrize(
    ("family", "task", "mode"),
    [("wan2.1", "encode_stream", True), ("seedvr2", "decode_stream", False)],
)
def test_a_parked_stream_goes_on_with_the_same_bits(family, task, mode, monkeypatch):
    vae = load_vae(STATES[family](), dtype=torch.float32)
    shape = (1, 3, 13, 16, 16) if task == "encode_stream" else (1, 16, 4, 2, 2)
    caches, keep = [], TemporalCache.__init__
    monkeypatch.setattr(
        TemporalCache, "__init__", lambda self, **o: [keep(self, **o), caches.append(self)][0]
    )
    with torch.inference_mode(mode):
        check_parked(getattr(vae, task), random_frames(*shape), caches)


def check_parked(stream, given, caches):
    expected = [*stream(given, StreamOptions(1))]
    parked = stream(given, StreamOptions(1))
    for piece in expected:
        assert torch.equal(next(parked), piece)
        before = [tail.data_ptr() for tail in caches[-1].tails.values()]
        parked.park()
        parked.park()  # is parked
        after = [tail.data_ptr() for tail in caches[-1].tails.values()]
        assert before
        assert not {*before} & {*after}
    assert next(parked, None) is None
    parked.park()  # has ended
