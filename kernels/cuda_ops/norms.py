"""Norms over the channels of a pixel, and over the pixels and groups of channels of a frame."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import shapes
from ..constraints import refuse_dtype
from .arguments import (
    THREADS,
    Fields,
    blocks,
    divisor,
    items,
    pack_of,
    packed,
    pointer,
    vector,
    video,
)
from .runtime import launch, refuse_counts

# Lanes of a warp, and the packs of a pixel that a lane keeps in registers: `kHeld` of rms_norm.cu.
_WARP = 32
_HELD = 3

# Pixels that a thread writes of an item: `kRounds * kPixels` of group_norm.cu.
_PIXELS = 16

# Most chunks of the statistics of a frame: enough blocks for the largest GPU, and few enough that
# combining them takes no time. With fewer pixels per chunk, its two numbers per channel would be a
# relevant cost.
_CHUNKS = 512
_SHARE = 256


def rms_norm_silu(x: Tensor, gamma: Tensor, bias: Tensor | None, *window: Any) -> Tensor:  # noqa: ANN401
    """Normalise each pixel by a team of up to 32 lanes."""
    vectors = vector(gamma), vector(bias)
    pack = _pack(x, window, *vectors)
    team = 1
    while team < _WARP and team * _HELD * pack < x.shape[1]:
        team *= 2
    teams, root = THREADS // team, ("f", (math.sqrt(x.shape[1]),))
    kernel = "rms_norm", "norm_pixels", (team, teams), teams, pack
    return _write(kernel, x, window, vectors, [root])


def group_norm_silu(
    x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor | None, *ends: Any,  # noqa: ANN401
) -> Tensor:  # fmt: skip
    """Measure the frames unless `statistics` are given, and write some pixels per block."""
    *window, groups, eps, silu, border = ends
    statistics = shapes.measured(x, statistics, groups, eps, group_norm_statistics)
    vectors = vector(weight), vector(bias)
    pack = _pack(x, window, *vectors)
    threads = _threads(x.shape[1] // pack)
    kernel = "group_norm", "write_pixels", threads, threads[1] * _PIXELS, pack
    after = divisor(x.shape[1] // groups), ("i", (groups,))
    before = *vectors, pointer(statistics)
    return _write(kernel, x, (*window, silu, border), before, after)


def group_norm_statistics(x: Tensor, out: Tensor, groups: int, eps: float) -> Tensor:
    """Measure chunks of the frames, and combine them."""
    # The division into chunks depends on the size only, so two calls are bit-identical.
    batch, channels, frames, height, width = x.shape
    pixels = height * width
    refuse_counts(pixels)
    share = max(_SHARE, blocks(pixels, _CHUNKS))
    chunks = blocks(pixels, share)
    partial = x.new_empty((batch * frames, chunks, 2, channels), dtype=torch.float32)
    pack = pack_of(x.dtype, channels, video(x))
    work, size = items(chunks, frames, batch), channels // groups
    arguments = packed(video(x), pointer(partial), work.fields, ("III", (share, pixels, channels)))
    threads = _threads(channels // pack)
    launch("group_norm", "sum_chunks", x, work.count, threads, arguments, PACK=pack)
    work = items(groups, frames, batch)
    arguments = packed(
        video(x), pointer(partial), pointer(out), work.fields,
        ("IIIiif", (chunks, share, pixels, channels, size, eps)),
    )  # fmt: skip
    wide = min(_WARP, 1 << (size - 1).bit_length())
    threads = wide, THREADS // wide
    launch("group_norm", "combine_chunks", x, work.count, threads, arguments, PACK=pack)
    return out


def _threads(packs: int) -> tuple[int, int]:
    """Return a block of about `THREADS` for pixels of some packs."""
    wide = min(packs, THREADS)
    return wide, THREADS // wide


def _pack(x: Tensor, window: Sequence[Any], *vectors: Fields) -> int:
    """Return the numbers that a thread of a norm reads at once, or refuse the dtype of codes."""
    tail, out, codes, *_ = window
    written = video(tail), video(out)
    if codes is None:
        return pack_of(x.dtype, x.shape[1], video(x), *written, *vectors)
    refuse_dtype(out, (torch.int8,))
    return pack_of(x.dtype, x.shape[1], video(x), vector(codes), *vectors, codes=written)


def _write(
    kernel: tuple[str, str, tuple[int, int], int, int],
    x: Tensor,
    window: Sequence[Any],
    before: Sequence[Fields],
    after: Sequence[Fields],
) -> Tensor:
    """Launch a norm for items of `each` pixels, with fields `before` and `after` its `Window`."""
    source, name, threads, each, pack = kernel
    tail, out, codes, saturated, silu, border = window
    batch, channels, frames, height, width = x.shape
    pixels = out.shape[3] * out.shape[4]
    refuse_counts(pixels + each, channels * 2)
    work = items(blocks(pixels, each), frames, batch)
    known = 0 if tail is None else tail.shape[2]
    sizes = pixels, height, width, border, channels, frames, known, silu
    arguments = packed(
        *before, *map(video, (x, tail, out)), *map(pointer, (codes, saturated)), work.fields,
        divisor(out.shape[4]), ("IIIIiiii", sizes), *after,
    )  # fmt: skip
    coded = {} if codes is None else {"CODES": 1}
    launch(source, name, x, work.count, threads, arguments, PACK=pack, **coded)
    return out
