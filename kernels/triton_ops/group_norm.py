"""Group norm of frames: statistics of blocks of rows, their combination, then the result.

The variance is never the difference of two large numbers. A lane sums the distances of its values
from its first value. The square of that value's own distance from their mean is part of the sum, so
the subtraction cancels no more digits than the sum has. Lanes and blocks are combined by their
means and their centred sums of squares (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances", 1979).
"""

# ruff: noqa: ANN001, ANN202, N803, N806 (kernels: Triton's types, constants in capitals)

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import shapes
from .runtime import launch
from .tiles import ELEMENTS, blocks, frame_grid, power_of_two, strides, tile
from .windows import tile_at, write_tile, write_window

# Tiles per program: enough that its output is small against its input.
_STEPS = 32


def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor | None,
    tail: Tensor | None,
    out: Tensor,
    codes: Tensor | None,
    saturated: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    border: int,
) -> Tensor:
    """Measure the frames unless `statistics` are given, and write a tile of `out` per program."""
    if statistics is None:
        statistics = x.new_empty(shapes.statistics(x, groups), dtype=torch.float32)
        group_norm_statistics(x, statistics, groups, eps)
    return write_window(
        _write, x, (tail, out, codes, saturated), weight, bias, statistics.contiguous(),
        border=border, elements=ELEMENTS // 2, SILU=silu, GROUPS=groups,
    )  # fmt: skip


def group_norm_statistics(x: Tensor, out: Tensor, groups: int, eps: float) -> Tensor:
    """Sum blocks of rows, and combine their means and squares."""
    batch, channels, frames, height, width = x.shape
    pixels = height * width
    rows, block, warps = tile(channels, ELEMENTS // 2)
    share = rows * _STEPS
    chunks = blocks(pixels, share)
    partial = torch.empty(
        (batch * frames, chunks, 2, channels), dtype=torch.float32, device=x.device
    )
    launch(
        _sum,
        frame_grid(chunks, x),
        *(x, partial, pixels, *strides(x)),
        warps=warps,
        CHANNELS=channels,
        ROWS=rows,
        STEPS=_STEPS,
        BLOCK=block,
    )
    size = channels // groups
    block = power_of_two(size)
    launch(
        _combine,
        (batch * frames, groups),
        *(partial, out, pixels, chunks, float(eps)),
        CHANNELS=channels,
        GROUPS=groups,
        SHARE=share,
        CHUNKS=max(1, ELEMENTS // 4 // block),
        BLOCK=block,
    )
    return out


@triton.jit(do_not_specialize=["pixels"])
def _sum(
    x, partial, pixels, x_batch, x_frame,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the mean of each channel over some rows, and the sum of squares about it."""
    chunk = tl.program_id(0)
    frame = tl.program_id(1).to(tl.int64)
    video = tl.program_id(2).to(tl.int64)
    start = chunk * (ROWS * STEPS)
    count = tl.minimum(pixels - start, ROWS * STEPS)
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    exists = channel < CHANNELS
    x += video * x_batch + frame * x_frame + start.to(tl.int64) * CHANNELS
    at = row * CHANNELS + channel

    first = tl.load(x + at, mask=(row < count) & exists, other=0).to(tl.float32)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for done in range(ROWS, count, ROWS):
        mask = (row + done < count) & exists
        v = tl.load(x + done * CHANNELS + at, mask=mask, other=0).to(tl.float32)
        v = tl.where(mask, v - first, 0.0)
        sums += v
        squares += v * v

    # Of a lane: the number of its values, and the distance of their mean from the first row.
    lane = tl.where(row < count, (count - 1 - row) // ROWS + 1, 0).to(tl.float32)
    share = 1.0 / tl.maximum(lane, 1.0)
    base = tl.load(x + channel, mask=exists, other=0).to(tl.float32)
    mean = tl.where(row < count, first - base + sums * share, 0.0)
    moved = tl.sum(lane * mean, axis=0, keep_dims=True) / count.to(tl.float32)
    squares += lane * (mean - moved) * (mean - moved) - sums * sums * share

    place = (video * tl.num_programs(1) + frame) * tl.num_programs(0) + chunk
    partial += place * (2 * CHANNELS)
    tl.store(partial + channel, base + moved, mask=exists)
    total = tl.sum(squares, axis=0, keep_dims=True)
    tl.store(partial + CHANNELS + channel, total, mask=exists)


@triton.jit(do_not_specialize=["pixels", "chunks"])
def _combine(
    partial, statistics, pixels, chunks, eps,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the mean of a group over a frame, and `1 / sqrt(var + eps)`."""
    SIZE: tl.constexpr = CHANNELS // GROUPS
    frame = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    chunk, channel = tl.arange(0, CHUNKS)[:, None], tl.arange(0, BLOCK)[None, :]
    partial += frame * chunks * (2 * CHANNELS) + group * SIZE
    at = chunk * (2 * CHANNELS) + channel
    base = tl.load(partial)
    numbers = pixels.to(tl.float32) * SIZE

    sums = tl.zeros((CHUNKS, BLOCK), tl.float32)
    for done in range(0, chunks, CHUNKS):
        mask = (chunk + done < chunks) & (channel < SIZE)
        count = tl.minimum(pixels - (chunk + done) * SHARE, SHARE).to(tl.float32)
        mean = tl.load(partial + done * (2 * CHANNELS) + at, mask=mask, other=0)
        sums += tl.where(mask, count * (mean - base), 0.0)
    moved = tl.sum(tl.sum(sums, axis=1), axis=0) / numbers

    squares = tl.zeros((CHUNKS, BLOCK), tl.float32)
    for done in range(0, chunks, CHUNKS):
        mask = (chunk + done < chunks) & (channel < SIZE)
        count = tl.minimum(pixels - (chunk + done) * SHARE, SHARE).to(tl.float32)
        place = partial + done * (2 * CHANNELS) + at
        mean = tl.load(place, mask=mask, other=0) - base - moved
        square = tl.load(place + CHANNELS, mask=mask, other=0)
        squares += tl.where(mask, square + count * mean * mean, 0.0)
    variance = tl.sum(tl.sum(squares, axis=1), axis=0) / numbers

    statistics += frame * (2 * GROUPS) + group
    tl.store(statistics, base + moved)
    tl.store(statistics + GROUPS, 1.0 / tl.sqrt_rn(variance + eps))


@triton.jit(do_not_specialize=["pixels", "frames", "known", "width"])
def _write(
    x, tail, out, codes, saturated, pixels, frames, known, width,
    x_batch, x_frame, tail_batch, tail_frame, out_batch, out_frame, weight, bias, statistics,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, SILU: tl.constexpr, BORDER: tl.constexpr,
    ZERO: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write some pixels of one new frame, and its share of the tail."""
    frame, video = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    channel, start, at, mask, origin, source, held = tile_at(
        pixels, width, CHANNELS, BORDER, ROWS, BLOCK
    )
    x += video * x_batch + frame * x_frame + origin
    v = tl.load(x + source, mask=held, other=0).to(tl.float32)
    exists, group = channel < CHANNELS, channel // (CHANNELS // GROUPS)
    statistics += (video * frames + frame) * (2 * GROUPS)
    mean = tl.load(statistics + group, mask=exists, other=0)
    scale = tl.load(statistics + GROUPS + group, mask=exists, other=0)
    scale *= tl.load(weight + channel, mask=exists, other=0).to(tl.float32)
    offset = tl.load(bias + channel, mask=exists, other=0).to(tl.float32)
    write_tile(
        (v - mean[None, :]) * scale[None, :] + offset[None, :],
        channel, start, at, mask, origin, source, held,
        tail, out, codes, saturated, frames, known, tail_batch, tail_frame, out_batch, out_frame,
        CHANNELS, SILU, BORDER, ZERO,
    )  # fmt: skip
