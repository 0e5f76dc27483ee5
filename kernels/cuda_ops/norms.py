"""Norms over the channels of a pixel, and over the pixels and groups of channels of a frame."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import shapes
from ..constraints import NormWindow, refuse_videos, window_of
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
    **written: Any,  # noqa: ANN401, those of `window_of`
) -> Tensor:
    """Normalise each pixel by a team of up to 32 lanes."""
    window = _target(x, written)
    channels = x.shape[1]
    scale, offset = dense(gamma, x), dense(bias, x)
    vectors = vector(scale), vector(offset)
    pack = _pack(x, window, *vectors)
    team = 1
    while team < _WARP and team * _HELD * pack < channels:
        team *= 2
    teams = THREADS // team
    fields, count = _fields(x, window, teams, silu=silu)
    arguments = packed(*vectors, *fields, ("f", (math.sqrt(channels),)))
    coded = {} if window.codes is None else {"CODES": 1}
    launch("rms_norm", "norm_pixels", x, count, (team, teams), arguments, PACK=pack, **coded)
    return window.out


def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    *,
    eps: float = 1e-6,
    silu: bool = True,
    statistics: Tensor | None = None,
    **written: Any,  # noqa: ANN401, those of `window_of`
) -> Tensor:
    """Measure the frames unless `statistics` are given, and write some pixels per block."""
    window = _target(x, written)
    if statistics is None:
        statistics = group_norm_statistics(x, groups, eps)
    channels = x.shape[1]
    scale, offset, statistics = dense(weight, x), dense(bias, x), statistics.contiguous()
    vectors = vector(scale), vector(offset)
    pack = _pack(x, window, *vectors)
    threads = _threads(channels // pack)
    fields, count = _fields(x, window, threads[1] * _PIXELS, silu=silu)
    arguments = packed(
        *vectors, pointer(statistics), *fields, divisor(channels // groups), ("i", (groups,))
    )
    coded = {} if window.codes is None else {"CODES": 1}
    launch("group_norm", "write_pixels", x, count, threads, arguments, PACK=pack, **coded)
    return window.out


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


def _target(x: Tensor, written: Mapping[str, Any]) -> NormWindow:
    """Return what a norm writes, with dense steps of codes, or refuse it."""
    window = window_of(x, **written)
    dtype = window.out.dtype
    if window.codes is not None and dtype != torch.int8:
        raise Refusal(f"there is no kernel for codes in {str(dtype).removeprefix('torch.')}")
    return window._replace(codes=dense(window.codes, x))


def _pack(x: Tensor, window: NormWindow, *vectors: Fields) -> int:
    """Return the numbers that a thread of a norm reads at once."""
    written = video(window.tail), video(window.out)
    if window.codes is None:
        return pack_of(x.dtype, x.shape[1], video(x), *written, *vectors)
    return pack_of(x.dtype, x.shape[1], video(x), vector(window.codes), *vectors, codes=written)


def _fields(
    x: Tensor, window: NormWindow, each: int, *, silu: bool
) -> tuple[tuple[Fields, ...], int]:
    """Return `Window` of the sources for items of `each` pixels, and the number of items."""
    tail, out, border, codes, saturated = window
    batch, channels, frames, height, width = x.shape
    pixels = out.shape[3] * out.shape[4]
    refuse_counts(pixels + each, channels * 2)
    work = items(blocks(pixels, each), frames, batch)
    known = 0 if tail is None else tail.shape[2]
    sizes = pixels, height, width, border, channels, frames, known, silu
    videos, pointers = map(video, (x, tail, out)), map(pointer, (codes, saturated))
    fields = *videos, *pointers, work.fields, divisor(out.shape[4]), ("IIIIiiii", sizes)
    return fields, work.count
