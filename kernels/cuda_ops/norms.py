"""Norms over the channels of a pixel, and over the pixels and groups of channels of a frame."""

import math

import torch
from torch import Tensor

from .. import shapes
from ..constraints import refuse_codes, refuse_videos, refuse_window
from ..errors import Refusal
from .arguments import (
    THREADS,
    Fields,
    blocks,
    dense,
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


def rms_norm_silu(
    x: Tensor,
    gamma: Tensor,
    *,
    silu: bool = True,
    bias: Tensor | None = None,
    tail: Tensor | None = None,
    out: Tensor | None = None,
    border: int = 0,
    codes: Tensor | None = None,
    saturated: Tensor | None = None,
) -> Tensor:
    """Normalise each pixel by a team of up to 32 lanes."""
    refuse_window(x, tail, out, border)
    out = _target(x, tail, out, border, codes, saturated)
    channels = x.shape[1]
    scale, offset = dense(gamma, x), dense(bias, x)
    vectors = vector(scale), vector(offset)
    codes = dense(codes, x)
    pack = _pack(x, tail, out, codes, *vectors)
    team = 1
    while team < _WARP and team * _HELD * pack < channels:
        team *= 2
    teams = THREADS // team
    window, count = _window(
        x, tail, out, border, teams, silu=silu, codes=codes, saturated=saturated
    )
    arguments = packed(*vectors, *window, ("f", (math.sqrt(channels),)))
    coded = {} if codes is None else {"CODES": 1}
    launch("rms_norm", "norm_pixels", x, count, (team, teams), arguments, PACK=pack, **coded)
    return out


def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    *,
    eps: float = 1e-6,
    silu: bool = True,
    statistics: Tensor | None = None,
    tail: Tensor | None = None,
    out: Tensor | None = None,
    border: int = 0,
    codes: Tensor | None = None,
    saturated: Tensor | None = None,
) -> Tensor:
    """Measure the frames unless `statistics` are given, and write some pixels per block."""
    refuse_window(x, tail, out, border)
    out = _target(x, tail, out, border, codes, saturated)
    if statistics is None:
        statistics = group_norm_statistics(x, groups, eps)
    channels = x.shape[1]
    scale, offset, statistics = dense(weight, x), dense(bias, x), statistics.contiguous()
    vectors = vector(scale), vector(offset)
    codes = dense(codes, x)
    pack = _pack(x, tail, out, codes, *vectors)
    threads = _threads(channels // pack)
    window, count = _window(
        x, tail, out, border, threads[1] * _PIXELS, silu=silu, codes=codes, saturated=saturated
    )
    arguments = packed(
        *vectors, pointer(statistics), *window, divisor(channels // groups), ("i", (groups,))
    )
    coded = {} if codes is None else {"CODES": 1}
    launch("group_norm", "write_pixels", x, count, threads, arguments, PACK=pack, **coded)
    return out


def group_norm_statistics(x: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """Measure chunks of the frames, and combine them."""
    # The division into chunks depends on the size only, so two calls are bit-identical.
    refuse_videos(x=x)
    batch, channels, frames, height, width = x.shape
    pixels = height * width
    refuse_counts(pixels)
    share = max(_SHARE, blocks(pixels, _CHUNKS))
    chunks = blocks(pixels, share)
    partial = torch.empty(
        (batch * frames, chunks, 2, channels), dtype=torch.float32, device=x.device
    )
    statistics = torch.empty(shapes.statistics(x, groups), dtype=torch.float32, device=x.device)
    pack = pack_of(x.dtype, channels, video(x))
    work, size = items(chunks, frames, batch), channels // groups
    arguments = packed(video(x), pointer(partial), work.fields, ("III", (share, pixels, channels)))
    threads = _threads(channels // pack)
    launch("group_norm", "sum_chunks", x, work.count, threads, arguments, PACK=pack)
    work = items(groups, frames, batch)
    arguments = packed(
        video(x), pointer(partial), pointer(statistics), work.fields,
        ("IIIiif", (chunks, share, pixels, channels, size, eps)),
    )  # fmt: skip
    wide = min(_WARP, 1 << (size - 1).bit_length())
    threads = wide, THREADS // wide
    launch("group_norm", "combine_chunks", x, work.count, threads, arguments, PACK=pack)
    return statistics


def _threads(packs: int) -> tuple[int, int]:
    """Return a block of about `THREADS` for pixels of some packs."""
    wide = min(packs, THREADS)
    return wide, THREADS // wide


def _target(
    x: Tensor,
    tail: Tensor | None,
    out: Tensor | None,
    border: int,
    codes: Tensor | None,
    saturated: Tensor | None,
) -> Tensor:
    """Return memory for the result of a norm, or refuse what the kernels cannot write."""
    refuse_codes(saturated)
    out = shapes.new_window(x, tail, border, coded=codes is not None) if out is None else out
    if codes is not None and out.dtype != torch.int8:
        raise Refusal(f"there is no kernel for codes in {str(out.dtype).removeprefix('torch.')}")
    return out


def _pack(
    x: Tensor, tail: Tensor | None, out: Tensor, codes: Tensor | None, *vectors: Fields
) -> int:
    """Return the numbers that a thread of a norm reads at once."""
    if codes is None:
        return pack_of(x.dtype, x.shape[1], video(x), video(tail), video(out), *vectors)
    steps = vector(codes)
    written = video(tail), video(out)
    return pack_of(x.dtype, x.shape[1], video(x), steps, *vectors, codes=written)


def _window(
    x: Tensor,
    tail: Tensor | None,
    out: Tensor,
    border: int,
    each: int,
    *,
    silu: bool,
    codes: Tensor | None,
    saturated: Tensor | None,
) -> tuple[tuple[Fields, ...], int]:
    """Return `Window` for items of `each` pixels, and the number of items."""
    batch, channels, frames, height, width = x.shape
    pixels = out.shape[3] * out.shape[4]
    refuse_counts(pixels + each, channels * 2)
    work = items(blocks(pixels, each), frames, batch)
    known = 0 if tail is None else tail.shape[2]
    sizes = pixels, height, width, border, channels, frames, known, silu
    fields = (
        video(x),
        video(tail),
        video(out),
        pointer(codes),
        pointer(saturated),
        work.fields,
        divisor(out.shape[4]),
        ("IIIIiiii", sizes),
    )
    return fields, work.count
