"""Frames in a ring give the convolution of frames in order, and memory is freed early."""

import functools
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.tests.vae.families import (
    STATES,
    VIDEO,
    close,
    joined,
    latent_for,
    random_frames,
)
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers import conv_weights
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.layers.oom import Relief
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.layers.workspace import Handover
from fast_video_vae.vae.planning import candidates
from fast_video_vae.vae.streaming import session

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _unrecorded():
    with torch.no_grad():
        yield


@pytest.fixture
def rings(monkeypatch):
    """Rings of all tails whose layer takes single frames, on a CPU too; the count of steps."""
    monkeypatch.setattr(conv_weights, "_FRAME_TO_WEIGHT", 0)
    steps, ring = [], TemporalCache.ring

    def counted(cache, *arguments):
        steps.append(cache)
        return ring(cache, *arguments)

    monkeypatch.setattr(TemporalCache, "ring", counted)
    return steps


@pytest.fixture
def conv():
    conv = CausalConv3d(4, 6).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in conv.parameters():
        parameter.normal_(generator=generator)
    return conv


def video(frames=14):
    x = torch.randn(1, frames, 5, 7, 4, generator=torch.Generator().manual_seed(1))
    return x.movedim(-1, 1)


def expected_of(conv, x):
    return F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0)), conv.weight, conv.bias)


def pushed(conv, x, cache, lengths, between=lambda cache: None):
    """Run the convolution on runs of `lengths` frames after the first frame."""
    results, start = [conv(x[:, :, :1], cache)], 1
    cache.first = False
    for length in lengths:
        run = x[:, :, start : start + length].contiguous(memory_format=torch.channels_last_3d)
        results.append(conv(run, cache))
        start += length
        between(cache)
    return torch.cat(results, dim=2)


@pytest.mark.parametrize("lengths", [[1] * 13, [1, 1, 2, 1, 3, 1, 1, 1, 2], [3, 1, 1, 1, 1, 6]])
def test_a_ring_gives_the_convolution_of_the_whole_video(rings, conv, lengths):
    x = video()
    torch.testing.assert_close(
        pushed(conv, x, TemporalCache(rings=True), lengths), expected_of(conv, x)
    )
    assert len(rings) == lengths.count(1)


def test_a_ring_can_move_to_the_host_and_back(rings, conv):
    x, parked = video(), []

    def park(cache):
        cache.thrifty = False  # as if memory were there again
        if len(rings) % 3 == 0:
            before = {each: tail.clone() for each, tail in cache.tails().items()}
            parked.append(cache.park())
            cache.thrifty = False
            for each, tail in cache.tails().items():
                assert torch.equal(tail, before[each])

    result = pushed(conv, x, TemporalCache(rings=True), [1] * 13, park)
    torch.testing.assert_close(result, expected_of(conv, x))
    assert len(parked) >= 4


def test_a_failed_step_leaves_the_ring_as_it_was(rings, conv, monkeypatch):
    """The frame that was written to the ring is computed again in bands of rows."""
    x, convolve, failed = video(), CausalConv3d.convolve, []

    def failing(self, window, kind, *arguments):
        if kind.startswith("volume") and window.shape[3] == 5 and len(rings) in (2, 6, 7):
            failed.append(kind)
            raise torch.OutOfMemoryError("no memory")
        return convolve(self, window, kind, *arguments)

    monkeypatch.setattr(CausalConv3d, "convolve", failing)
    cache = TemporalCache(rings=True)
    cache.workspace.relief = Relief(CPU, "a decode")
    torch.testing.assert_close(pushed(conv, x, cache, [1] * 13), expected_of(conv, x))
    assert len(failed) >= 3


@pytest.mark.usefixtures("plans_anew")
@pytest.mark.parametrize("family", VIDEO)
def test_a_video_in_rings_is_the_video_in_order(rings, family, monkeypatch):
    vae = load_vae(STATES[family](), dtype=torch.float32)
    latent, frames = latent_for(vae, 4, 64, 64), random_frames(1, 3, 13, 64, 64)
    expected = vae.decode(latent), vae.encode(frames)
    assert not rings  # on a CPU the plan has none
    make_plan = session.make_plan
    monkeypatch.setattr(
        session, "make_plan", lambda *a, **k: replace(make_plan(*a, **k), rings=True)
    )
    monkeypatch.setattr(candidates, "_CPU_PART_BYTES", 1)
    close(joined(vae.decode_stream(latent, StreamOptions(1))), expected[0])
    decoded = len(rings)
    close(joined(vae.encode_stream(frames, StreamOptions(1))), expected[1])
    assert 0 < decoded < len(rings)


def test_a_frame_is_kept_in_order_where_turned_weights_would_be_larger(conv):
    cache = TemporalCache(rings=True)
    pushed(conv, video(), cache, [1] * 3)
    assert not conv.forms.keys() & {(conv_weights.turned(n), torch.float32) for n in (1, 2)}


@pytest.mark.parametrize("ringed", [False, True])
def test_the_input_is_freed_before_the_products(rings, conv, monkeypatch, ringed):
    """So the result of the first convolution of a block and of the second are never both there."""
    alive, convolve = [], CausalConv3d.convolve
    given = []

    def looked(self, *arguments):
        alive.append(given[0]() is not None)
        return convolve(self, *arguments)

    monkeypatch.setattr(CausalConv3d, "convolve", looked)
    cache = TemporalCache(rings=ringed)
    fill = functools.partial(lambda x, *, out, tail=None: _filled(x, out, tail))
    for start in range(3):
        x = video()[:, :, start : start + 1].clone(memory_format=torch.channels_last_3d)
        given[:] = [weakref.ref(x)]
        handed = Handover(x)
        del x
        conv(handed, cache, fill)
        cache.first = False
    assert alive == [False] * 3
    with pytest.raises(RuntimeError, match="taken before"):
        handed.take()


def _filled(x, out, tail):
    context = 0 if tail is None else tail.shape[2]
    out[:, :, context:] = x
    if tail is not None:
        out[:, :, :context] = tail
        tail.copy_(out[:, :, -context:])
