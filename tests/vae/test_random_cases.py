"""Hundreds of random cases: equal to diffusers, or an error of one line.

Sizes, lengths, batches, chunks, tiles, limits, ranges and splits are drawn together, with a fixed
seed. The reference is diffusers' `AutoencoderKLWan`, which runs on whole frames.
"""

import functools
import itertools
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.vae.families import STATES, WAN, close
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.planning import candidates, plan, tiling

# Dtypes of frames; None: float32. The value of white in those of whole numbers.
DTYPES = [None, torch.uint8, torch.uint16]
WHITE = {torch.uint8: 255, torch.uint16: 65535}

# The same cases on every machine, without a time limit per case.
same = functools.partial(settings, derandomize=True, deadline=None)


@functools.cache
def vae_and_peer(family):
    state = STATES[family]()
    return load_vae(state, dtype=torch.float32), diffusers_vae(state)


@dataclass(frozen=True)
class Case:
    """The inputs and options of one stream.

    Attributes:
        family: Family of the VAE.
        batch: Videos per batch.
        length: Latents of a decode, or frames of an encode.
        size: Height and width of the frames.
        chunk: Latents per step.
        tile: Height and width of the tiles.
        cut: Index of the cut between whole frames and tiles in `can_cut`; None: chosen.
        limit_bytes: Memory limit of a step.
        cuts: Frames at which the video is cut into the pieces of an iterable; None: one tensor.
        wanted: First and last frame of a decode; None: all.
        target: Destination of a decode: `new`, `out`, `images` or `bytes`.
        static: Frame from which on the clip is static.
        dtype: The frames are uint8 or uint16; None: float32.
    """

    family: str
    batch: int
    length: int
    size: tuple[int, int]
    chunk: int | None
    tile: tuple[int, int] | None
    cut: int | None
    limit_bytes: int | None
    cuts: tuple[int, ...] | None
    wanted: tuple[int, int] | None = None
    target: str = "new"
    static: int = 0
    dtype: torch.dtype | None = None

    @property
    def vae(self):
        return vae_and_peer(self.family)[0]

    @property
    def options(self):
        return StreamOptions(self.chunk, limit_bytes=self.limit_bytes, tile=self.tile)

    @property
    def frames(self):
        """The wanted frames as a range; None: all."""
        return self.wanted and range(self.wanted[0], self.wanted[1] + 1)

    def pieces(self, video):
        """Return the video as a tensor, or as an iterator of its pieces."""
        if self.cuts is None:
            return video
        edges = [0, *self.cuts, video.shape[2]]
        return (video[:, :, start:stop] for start, stop in itertools.pairwise(edges))


@functools.lru_cache(maxsize=64)
def latent_and_frames(family, batch, length, size):
    """Return a latent, and the frames that diffusers decodes from it."""
    vae, peer = vae_and_peer(family)
    step = vae.config.spatial_compression
    shape = batch, vae.config.latent_channels, length, size[0] // step, size[1] // step
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return latent, peer.decode(latent)


def clip(case):
    """Return frames that are static from frame `case.static` on."""
    shape = case.batch, 3, case.length, *case.size
    generator = torch.Generator().manual_seed(sum(shape))
    frames = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    frames[:, :, case.static :] = frames[:, :, min(case.static, case.length - 1), None]
    if case.dtype == torch.uint16:
        return (frames.int() * 257).to(torch.uint16)
    return frames if case.dtype else frames / 127.5 - 1


@st.composite
def cases(draw, *, decode):
    family = draw(st.sampled_from(WAN))
    step = 8 if family == "wan2.1" else 16
    size = tuple(step * draw(st.integers(1, 48 // step + 1)) for _ in range(2))
    length = draw(st.integers(1, 5)) if decode else draw(st.integers(1, 17))
    cuts = st.lists(st.integers(1, max(1, length - 1)), max_size=4, unique=True).map(sorted)
    pieces = draw(st.none() | cuts.map(tuple)) if length > 1 else draw(st.sampled_from([None, ()]))
    tile = draw(tiles(size))
    case = {
        "family": family,
        "batch": draw(st.integers(1, 2)),
        "length": length,
        "size": size,
        "chunk": draw(st.sampled_from([None, -1, 1, 2, 3, 4, 5])),
        "tile": tile,
        "cut": draw(st.none() | st.integers(0, 2)) if tile else None,
        "limit_bytes": draw(st.sampled_from([None, 1, 300_000])),
        "cuts": pieces,
    }
    if not decode:
        static = draw(st.integers(0, length))
        return Case(**case, static=static, dtype=draw(st.sampled_from(DTYPES)))
    frame = st.integers(0, 4 * length - 4)
    wanted = draw(st.none() | st.tuples(frame, frame).map(sorted).map(tuple))
    target = draw(st.sampled_from(["new", "out", "images", "bytes"]))
    return Case(**case, wanted=wanted, target=target)


def tiles(size):
    """Draw sizes of tiles: small, odd, or larger than the frames; at most four tiles in a row."""
    some = [st.integers(max(1, length // 4), length) for length in size]
    larger = [st.integers(max(1, length // 4), 100_000) for length in size]
    return st.one_of(st.none(), st.tuples(*some), st.tuples(*larger))


@contextmanager
def cut_there(case):
    """Let plans choose the cut of the case only."""
    with pytest.MonkeyPatch.context() as patch:
        if case.cut is not None:
            patch.setattr(plan, "kept_candidates", candidates.Candidates)
            patch.setattr(candidates, "can_cut", lambda net: tiling.can_cut(net)[case.cut :][:1])
        yield


@same(max_examples=35)
@given(cases(decode=True))
def test_a_decode_equals_diffusers(case):
    check_decode(case)


@pytest.mark.slow
@same(max_examples=150)
@given(cases(decode=True))
def test_many_decodes_equal_diffusers(case):
    check_decode(case)


def check_decode(case):
    latent, expected = latent_and_frames(case.family, case.batch, case.length, case.size)
    if case.wanted:
        expected = expected[:, :, case.frames.start : case.frames.stop]
    images = (expected.movedim(1, -1) + 1) / 2
    targets = {
        "new": {},
        "out": {"out": torch.full_like(expected, torch.nan)},
        "images": {"images": torch.full_like(images, torch.nan)},
        "bytes": {"images": torch.full_like(images, 7, dtype=torch.uint8)},
    }
    target = targets[case.target]
    with cut_there(case):
        got = [
            *case.vae.decode_stream(case.pieces(latent), case.options, **target, frames=case.frames)
        ]
    if case.target in ("images", "bytes"):
        written, joined = target["images"], torch.cat(got, dim=1)
    else:
        joined = torch.cat(got, dim=2)
        written = target.get("out", joined)
    assert torch.equal(written, joined)
    if case.target == "images":
        close(written, images)
    elif case.target == "bytes":
        cut_off = 255 * images - written
        assert cut_off.min() >= -255e-5
        assert cut_off.max() < 1 + 255e-5
    else:
        close(written.clamp(-1, 1), expected)  # diffusers clamps


@same(max_examples=35)
@given(cases(decode=False))
@example(Case("wan2.2", 1, 5, (16, 64), None, (8, 16), None, 1, None))  # steps of an odd frame
def test_an_encode_equals_diffusers(case):
    check_encode(case)


@pytest.mark.slow
@same(max_examples=150)
@given(cases(decode=False))
def test_many_encodes_equal_diffusers(case):
    check_encode(case)


def check_encode(case):
    frames, (vae, peer) = clip(case), vae_and_peer(case.family)
    dropped = (case.length - 1) % 4
    used = frames[:, :, : case.length - dropped]
    expected = peer.encode(used.float() / WHITE[case.dtype] * 2 - 1 if case.dtype else used)
    with cut_there(case), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = torch.cat([*vae.encode_stream(case.pieces(frames), case.options)], dim=2)
    close(got, expected)
    lost = "frame was" if dropped == 1 else "frames were"
    message = [f"the last {dropped} {lost} dropped; the VAE needs 4 n + 1 frames"]
    assert [str(each.message) for each in caught] == (message if dropped else [])


# An argument, a wrong value, and the error.
WRONG = [
    ("chunk", 0, "chunk is 0; expected a number of latents, -1 for all, or None"),
    ("chunk", -2, "chunk is -2; expected a number of latents, -1 for all, or None"),
    ("chunk", 1.5, "chunk is 1.5; expected a number of latents, -1 for all, or None"),
    ("chunk", True, "chunk is True; expected a number of latents, -1 for all, or None"),
    *(
        ("tile", tile, f"tile is {tile!r}; expected height and width in pixels, or None")
        for tile in [(0, 64), (16, -8), (1.5, 16), (True, 8), (64,), (8, 8, 8), (), 64, "64"]
    ),
    ("dtype", "float32", "dtype is 'float32'; expected a float dtype such as torch.float32"),
    ("dtype", torch.int32, "dtype is torch.int32; expected a float dtype such as torch.float32"),
]
WRONG_OF_DECODE = [
    *(
        ("frames", frames, f"frames are {frames!r}; expected a range ")
        for frames in [range(0), range(5, 2), range(-3, 1), range(0, 1, 2), (0, 1), 0]
    ),
    ("frames", range(30, 40), "frames are range(30, 40)"),
    ("out", "frames", "out is a str; expected a tensor"),
    ("images", 0, "images is a int; expected a tensor"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_options_are_refused(name, value, message):
    fails(lambda: StreamOptions(**{name: value}), message)


@pytest.mark.parametrize(("name", "value", "message"), WRONG_OF_DECODE)
@same(max_examples=2)
@given(cases(decode=True))
def test_wrong_arguments_of_a_decode_are_refused(name, value, message, case):
    latent, _ = latent_and_frames(case.family, 1, case.length, case.size)
    arguments = {"options": case.options, name: value}
    if case.cuts is None or name != "frames":  # the length of an iterable is known at its end
        fails(lambda: case.vae.decode_stream(case.pieces(latent), **arguments), message)
    fails(lambda: [*case.vae.decode_stream(case.pieces(latent), **arguments)], message)


@same(max_examples=20)
@given(cases(decode=True), st.sampled_from(range(5)), st.sampled_from([-1, 1]))
def test_buffers_of_another_shape_are_refused(case, dimension, change):
    latent, frames = latent_and_frames(case.family, case.batch, case.length, case.size)
    for name, right in (("out", frames), ("images", frames.movedim(1, -1))):
        shape = list(right.shape)
        shape[dimension] += change
        message = f"{name} has shape {shape}; expected {list(right.shape)}"
        target = {name: torch.empty(shape)}
        fails(lambda: case.vae.decode_stream(latent, case.options, **target), message)  # noqa: B023


@same(max_examples=20)
@given(cases(decode=False), st.integers(0, 70), st.integers(0, 70), st.integers(0, 2))
def test_frame_sizes_must_be_multiples_of_the_compression(case, height, width, batch):
    step = case.vae.config.spatial_compression
    frames = torch.zeros(batch, 3, case.length, height, width)
    message = f"frames are {height} x {width} (H x W); expected multiples of {step}"
    if not frames.numel():
        message = f"frames is empty, {list(frames.shape)}; expected at least one of each dimension"
    elif height % step == width % step == 0:
        return
    fails(lambda: case.vae.encode_stream(frames, case.options), message)


def spoiled(x, place, value):
    x = x.clone()
    x.view(-1)[place % x.numel()] = value
    return x


# A change that makes a video wrong, and the error.
WRONG_VIDEOS = {
    "no batch": (lambda x: x[:0], "is empty, [0, "),
    "no frames": (lambda x: x[:, :, :0], "is empty, ["),
    "no height": (lambda x: x[..., :0, :], "is empty, ["),
    "no width": (lambda x: x[..., :0], "is empty, ["),
    "one channel": (lambda x: x[:, :1], "has 1 channels; this VAE needs "),
    "a picture": (lambda x: x[:, :, 0], "has 4 dimensions, ["),
    "integers": (lambda x: x.long(), "int64; expected a float dtype"),
    "bits": (lambda x: x > 0, "bool; expected a float dtype"),
    "NaN": (lambda x: spoiled(x, 1_000_003, torch.nan), " has 1 values that are NaN or infinite"),
    "infinite": (lambda x: spoiled(x, 65_537, -torch.inf), " has 1 values that are NaN or inf"),
    "an array": (lambda x: x.numpy(), " is a ndarray; expected a tensor ["),
    "None": (lambda _: None, " is a NoneType; expected a tensor ["),
    "a number": (lambda _: 5, " is a int; expected a tensor ["),
    "nothing": (lambda _: iter([]), "; expected at least one"),
    "another size": (lambda x: iter([x, torch.cat([x, x], dim=3)]), "a piece has shape ["),
    "another batch": (lambda x: [x, torch.cat([x, x])], "a piece has shape ["),
}


@pytest.mark.parametrize("kind", WRONG_VIDEOS)
@same(max_examples=2)
@given(cases(decode=True), cases(decode=False))
def test_wrong_videos_are_refused(kind, latents, frames):
    change, message = WRONG_VIDEOS[kind]
    latent, _ = latent_and_frames(latents.family, latents.batch, latents.length, latents.size)
    fails(lambda: [*latents.vae.decode_stream(change(latent), latents.options)], message)
    video = clip(frames).float()
    fails(lambda: [*frames.vae.encode_stream(change(video), frames.options)], message)


def fails(call, message):
    """Check that `call` raises a `ValueError` of one line with this message."""
    with refused(re.escape(message)):
        call()
