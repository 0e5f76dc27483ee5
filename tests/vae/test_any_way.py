"""Any way through a VAE gives the frames and latents of another implementation.

One test draws the family, the direction, the video and how it is given, all options of a stream,
the devices, the memory for its result, what the library can fuse, allocations that fail, and a
latent that overflows in float16. The oracles compute whole clips in float64: diffusers, and for
SeedVR2 plain PyTorch (`seedvr2_oracle.py`). Frames in int8 are those of a whole decode in int8.

No way pads frames over time with `F.pad`: on Apple's GPUs pads of the third dimension of five give
wrong values from 65,536 pixels on.
"""

import collections
import contextlib
import functools
import re
import tempfile
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

from fast_video_vae.kernels.convolution import onednn
from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.vae.families import (
    Pads,
    all_layers_in_int8,
    close,
    computes_16_bits,
    joined,
    prepared,
    random_latent,
    relative_error,
)
from fast_video_vae.tests.vae.layers.candidate import serve
from fast_video_vae.tests.vae.models.seedvr2_oracle import Oracle
from fast_video_vae.tests.vae.streaming.failing_memory import ERRORS, FailingMemory
from fast_video_vae.tests.vae.streaming.test_session import StandIn
from fast_video_vae.tests.vae.ways import FAMILIES, TARGETS, WHITE, Case, case_of
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.background_writer import BackgroundWriter
from fast_video_vae.vae.layers import conv
from fast_video_vae.vae.planning import plan, tiling
from fast_video_vae.vae.streaming import cuda_graph, output, precision, session
from fast_video_vae.vae.streaming import resume as resume_module


class PerFrame:
    """A peer that sees one frame at a time."""

    def __init__(self, peer):
        self.encode, self.decode = (
            lambda x, run=run: torch.cat([run(each) for each in x.split(1, dim=2)], dim=2)
            for run in (peer.encode, peer.decode)
        )


@functools.cache
def peer_of(family, gain):
    state = state_of(family, gain)
    if family == "seedvr2":
        return Oracle({name: value.double() for name, value in state.items()})
    peer = diffusers_vae(state, dtype=torch.float64, qwen_image=family == "qwen-image")
    return PerFrame(peer) if family == "qwen-image-2.1" else peer


@functools.cache
def vae_of(family, gain, weights, precision):
    """A VAE; each layout of the weights has its own."""
    dtype = torch.float32 if gain == 1 else torch.bfloat16
    return prepared(load_vae(state_of(family, gain), dtype=dtype, precision=precision))


def state_of(family, gain):
    """The weights; those before the first norm of the decoder are so much larger."""
    first = "decoder.conv_in." if family == "seedvr2" else "decoder.conv1."
    state = FAMILIES[family]()
    return {key: value * gain if key.startswith(first) else value for key, value in state.items()}


# Copies of networks on `meta`, in which plans run, by the network and what it calls.
KEPT = collections.defaultdict(conv.Kept)


@contextlib.contextmanager
def played(case, vae):
    """The devices of a case are played by the CPU."""
    vae.devices = ["cpu"] * case.devices * (case.devices > 1)
    vae.shares = case.shares
    yield
    vae.devices = []


@contextlib.contextmanager
def circumstances(case, vae, share):
    """Let a plan take the cut and the parts of the case, and the library fuse what it says."""
    with pytest.MonkeyPatch.context() as patch:
        for network in filter(None, (vae.encoder, vae.decoder)):
            kept = conv.Kept() if case.fails else KEPT[network, case.fused, case.bright is None]
            for key in [key for key in kept if key[0] != "twin"]:
                del kept[key]  # plans are made anew
            patch.setattr(network, "kept", kept)
        if case.cut is not None:
            patch.setattr(plan, "can_cut", lambda net: tiling.can_cut(net)[case.cut :][:1])
        if case.part_bytes is not None:
            patch.setattr(plan, "_CPU_PARTS", (case.part_bytes,))
            patch.setattr(plan, "_SMALL_PARTS", ())
        if case.parked:
            make = session.make_plan
            parked = lambda *args, **given: replace(make(*args, **given), parked=True)  # noqa: E731
            patch.setattr(session, "make_plan", parked)
        if case.background:
            writer = functools.partial(BackgroundWriter, output._fill, dtype=None)
            patch.setattr(
                resume_module, "background_writer", lambda _, to: None if to is None else writer()
            )
        if case.bright is not None:
            patch.setattr(precision, "fp16_pays", lambda device: True)
            computes_16_bits(patch)
        if case.graphs:
            patch.setattr(cuda_graph, "Recording", StandIn)
            patch.setattr(cuda_graph, "takes", lambda _: True)
            patch.setattr(vae, "graphs", True)
        if case.weights == "plain":
            patch.setattr(onednn, "serves", lambda *_: False)  # as on a GPU
        if case.fused is not None:
            serve(patch, case.fused)
        products, convolve = [], conv.int8_conv3d

        def convolved(x, *args, **given):
            products.extend([] if x.is_meta else [0])  # a plan runs on `meta`
            return convolve(x, *args, **given)

        patch.setattr(conv, "int8_conv3d", convolved)
        pads, run = Pads(), threading.Thread.run

        def watched(thread):
            with pads:
                run(thread)

        patch.setattr(threading.Thread, "run", watched)
        with pads, share(case, vae):
            yield
    assert not pads.seen
    assert case.fails or bool(products) == (case.precision == "int8")


def outcome(case, vae, share, start):
    """Return the pieces of a stream, or a whole result as one; none after an error of one line."""
    first, in_a_row = case.fails or (0, 0)
    memory = FailingMemory(first, in_a_row, error=list(ERRORS)[(first + in_a_row) % len(ERRORS)])
    copied = case.fails is None and TARGETS[case.target][0]
    try:
        with circumstances(case, vae, share), memory if case.fails else contextlib.nullcontext():
            made = start()
            return [made] if case.whole else [each.clone() if copied else each for each in made]
    except torch.OutOfMemoryError as error:
        message = str(error)
    tasks = "an encode|a decode|the choice of int8"
    assert re.fullmatch(rf"memory ran out in ({tasks})[^\n]{{,130}}", message)
    assert memory.failed > 1  # a stream recovers from a single failure at any place
    return []


def compare(case, actual, expected, clamped=False):
    """Compare with the oracle: within 1e-5 of its largest number, or the errors of 16 bits."""
    assert actual.shape == expected.shape
    actual = actual.clamp(-1, 1) if clamped else actual
    if case.precision == "int8":
        # Convolutions of other sizes can round differently, which changes some codes.
        assert relative_error(actual, expected) <= 5e-2
    elif case.result in (torch.bfloat16, torch.float16):
        # About 30 roundings of half a unit in the last place, one after the other.
        eps = torch.finfo(case.result).eps
        assert (actual.double() - expected).norm() <= 15 * eps * expected.norm()
    else:
        close(actual, expected)


def check_decode(case, vae, share):
    config = vae.config
    shape = case.batch, config.latent_channels, case.length, *case.size
    latent = random_latent(*shape, seed=sum(shape))
    if case.bright is not None:
        latent[:, :, case.bright] *= 1e3
        vae.allow_fp16 = True
    before = latent.clone()
    if case.precision == "int8":
        whole = vae_of(case.family, case.gain, "whole", case.precision)
        options = StreamOptions(-1, case.computed)
        expected = joined(whole.decode_stream(latent, options)).double().clamp(-1, 1)
    else:
        expected = peer_of(case.family, case.gain).decode(latent.double()).clamp(-1, 1)
        if case.family == "2x":
            expected = F.pixel_shuffle(expected.movedim(2, 1), 2).movedim(1, 2)
    if case.wanted:
        expected = expected[:, :, case.frames.start : case.frames.stop]
    name, dtype = TARGETS[case.target]
    ours = (expected.movedim(1, -1) + 1) / 2 if name == "images" else expected
    memory = torch.full(ours.shape, 7, dtype=dtype) if name else None
    options = StreamOptions(case.chunk, case.computed, case.limit_bytes, case.tile)
    arguments = {"frames": case.frames, **({name: memory} if name else {})}
    video = case.given(latent)
    if case.whole:
        pieces = outcome(case, vae, share, lambda: vae.decode(video, case.chunk))
    else:
        pieces = outcome(case, vae, share, lambda: vae.decode_stream(video, options, **arguments))
    if not pieces:
        return
    got = torch.cat(pieces, dim=1 if name == "images" else 2)
    assert torch.equal(latent, before)
    assert got.dtype == (dtype or case.result)
    assert case.wanted or not vae.allow_fp16  # the overflow was found
    assert memory is None or torch.equal(got, memory)
    if dtype in WHITE:
        white = WHITE[dtype]
        error = white * (1e-5 if case.result in (torch.float32, torch.float64) else 0.25)
        error = max(error, 5e-2 * white * (case.precision == "int8"))
        cut_off = white * ours - got.double()
        assert cut_off.min() >= -error
        assert cut_off.max() < 1 + error
    else:
        compare(case, got, ours, clamped=name != "images")


def clip(case, channels, side):
    """Return frames of which some are the same, in the dtype of the case."""
    shape = case.batch, channels, case.length, *(side * length for length in case.size)
    generator = torch.Generator().manual_seed(sum(shape))
    numbers = WHITE[case.dtype or torch.uint8] + 1
    frames = torch.randint(numbers, shape, generator=generator, dtype=torch.int32)
    start = 0
    for run in case.runs:
        frames[:, :, start : start + run] = frames[:, :, min(start, case.length - 1), None]
        start += run
    return frames.to(case.dtype) if case.dtype else frames / 127.5 - 1


def check_encode(case, vae, share):
    config = vae.config
    frames = clip(case, config.image_channels, config.spatial_compression)
    dropped = (case.length - 1) % config.temporal_compression
    used = frames[:, :, : case.length - dropped].double()
    used = used / WHITE[case.dtype] * 2 - 1 if case.dtype else used
    expected = peer_of(case.family, case.gain).encode(used)
    options = StreamOptions(case.chunk, case.computed, case.limit_bytes, case.tile)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        video = case.given(frames)
        if case.whole:
            pieces = outcome(case, vae, share, lambda: vae.encode(video, case.chunk))
        else:
            pieces = outcome(case, vae, share, lambda: vae.encode_stream(video, options))
    if not pieces:
        return
    got = torch.cat(pieces, dim=2)
    assert got.dtype == case.result
    compare(case, got, expected)
    lost = "frame was" if dropped == 1 else "frames were"
    message = [f"the last {dropped} {lost} dropped; the VAE needs 4 n + 1 frames"]
    assert [str(each.message) for each in caught] == (message if dropped else [])


def check(case, share=played):
    """Compare a case with its oracle; `share` lets its VAE use several devices."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if case.precision == "int8":
            all_layers_in_int8(patch, Path(folder))
            for weights in (case.weights, "whole"):
                prepared(vae_of(case.family, case.gain, weights, case.precision))
        vae = vae_of(case.family, case.gain, case.weights, case.precision)
        (check_decode if case.decode else check_encode)(case, vae, share)


def check_both(seed, share=played, **options):
    """Compare a decode and an encode with their oracles."""
    for decode in (True, False):
        case = case_of(seed, decode=decode, **options)
        note(case)
        check(case, share)


# The same cases on every machine, without a time limit per case. A smaller seed is no smaller case.
same = functools.partial(
    settings, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate]
)
SEEDS = st.integers(0, (1 << 64) - 1)

SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


# An encode in steps of an odd frame, one of 80 equal frames as of WanImageToVideo, one of equal
# frames in tiles and in parts, SeedVR2 in bands of rows.
SPECIAL = [
    Case("wan2.2", False, 1, 5, (1, 4), tile=(8, 16), limit_bytes=1),
    Case("wan2.1", False, 1, 81, (2, 2), runs=(1, 80), chunk=1),
    Case("wan2.2", False, 1, 20, (4, 2), runs=(20,), tile=(22, 22), limit_bytes=1, part_bytes=4096),
    Case("seedvr2", True, 1, 2, (4, 1), limit_bytes=1, part_bytes=1),
    Case("seedvr2", False, 1, 5, (3, 1), limit_bytes=1, part_bytes=1, chunk=2),
]


@same(max_examples=30)
@given(SEEDS)
def test_any_way_gives_the_same_video(seed):
    check_both(seed)


@pytest.mark.parametrize("case", SPECIAL, ids=lambda case: case.family)
def test_special_ways_give_the_same_video(case):
    check(case)


@NIGHTLY
@pytest.mark.parametrize("in_a_row", [1, 2, 10, 1 << 40])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"chunk": 1}, {"chunk": 1, "tile": (16, 16)}, {"cuts": (1, 2)}]
)
def test_any_allocation_can_fail(decode, options, in_a_row):
    case = Case("wan2.1", decode, 1, 3 if decode else 9, (3, 2), **options)
    for place in range(1, 700):
        check(replace(case, fails=(place, in_a_row)))


# Of the same seeds each part makes other cases; most are for the night.
PARTS = [pytest.param(n, marks=SLOW if n == 1 else NIGHTLY) for n in range(1, 45)]


@pytest.mark.parametrize("part", PARTS)
@same(max_examples=30)
@given(SEEDS)
def test_many_ways_give_the_same_video(part, seed):
    check_both(seed + part)
