"""Tails of tiles on the host: order of the copies, size of the memory, and no pinned memory."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import close, joined, latent_for
from fast_video_vae.tests.vae.streaming.fake_gpu import CUDA, FakeGPU
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.streaming import cache_offload, session, tiled_executor
from fast_video_vae.vae.streaming.cache_offload import HostMemory, Parking


@pytest.fixture
def gpu(monkeypatch):
    with FakeGPU(monkeypatch) as gpu:
        yield gpu


def cache_of(*shapes):
    """Return a cache with tails of `shapes`, as after the first chunk."""
    cache = TemporalCache()
    cache.tails = {nn.Identity(): torch.randn(shape) for shape in shapes}
    return cache


def test_no_copy_overtakes_another_use_of_its_memory(gpu):
    caches = [cache_of((1, 4, 2, 3, 5), (1, 8, 2, 3, 5)) for _ in range(3)]
    before = [dict(cache.tails) for cache in caches]
    parking = Parking(CUDA)
    for _ in range(3):  # chunks as in `TiledExecutor`: each tile adds 1 to its tails
        for cache, following in zip(caches, [*caches[1:], None], strict=True):
            parking.wait(cache)
            if following is not None:
                parking.fetch(following)
            for tail in cache.tails.values():
                gpu.use("compute", tail.add_(1))
            parking.park(cache)
    assert not gpu.races
    assert gpu.blocking == {False}
    for cache, tails in zip(caches, before, strict=True):
        for conv, tail in cache.tails.items():
            torch.testing.assert_close(tail, tails[conv] + 3)


def test_tails_of_gigabytes_need_little_more_pinned_memory(gpu):
    """Each of these would be doubled, or nearly, by an allocation of its own."""
    memory, held = HostMemory(pinned=True), 0
    for _ in range(12):
        tails = [torch.empty(130 * size, dtype=torch.uint8) for size in (512, 256, 256, 128, 64)]
        memory.reserve(tails)
        held += sum(len(memory.like(tail)) for tail in tails)
    assert held <= sum(gpu.pins) <= 1.25 * held
    assert all(size & (size - 1) == 0 for size in gpu.pins)


def test_the_frames_come_without_pinned_memory(monkeypatch, caplog):
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    latent = latent_for(vae, 3, 96, 128)
    expected = vae.decode(latent)
    plan = session.make_plan
    monkeypatch.setattr(
        session, "make_plan", lambda *args, **given: replace(plan(*args, **given), parked=True)
    )
    monkeypatch.setattr(tiled_executor, "Parking", lambda _: cache_offload.Parking(CUDA))
    options = StreamOptions(1, tile=(64, 64))
    with caplog.at_level(logging.WARNING), FakeGPU(monkeypatch, refuses=True) as gpu:
        for _ in range(2):
            close(joined(vae.decode_stream(latent, options)), expected)
    assert not gpu.pins
    assert not gpu.races
    assert gpu.blocking == {True}
    (line,) = caplog.messages
    assert "memory cannot be pinned (CUDA error: operation not permitted)" in line
