"""The norms: over the channels of a pixel, and over the pixels and groups of channels of a frame.

The variance is never the difference of two large numbers. A lane sums the distances of its values
from its first value. The square of that value's own distance from their mean is part of the sum, so
the subtraction cancels no more digits than the sum has. Lanes and blocks are combined by their
means and their centred sums of squares (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances", 1979).
"""

# ruff: noqa: ANN001, ANN202, N803, N806 (kernels: Triton's types, constants in capitals)

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import shapes
from ..codes import zero_of
from .runtime import launch
from .scalars import encoded, narrow, silu_of
from .tiles import ELEMENTS, blocks, frame_grid, given, power_of_two, strides, tile

# Tiles per program of the statistics: enough that its output is small against its input.
_STEPS = 32


def rms_norm_silu(x: Tensor, gamma: Tensor, bias: Tensor | None, *window: Any) -> Tensor:  # noqa: ANN401
    """Normalise the pixels of a tile per program, each in one pass over its channels."""
    vectors = gamma, gamma if bias is None else bias, None, given(bias)
    return _write_window(x, window, *vectors, elements=ELEMENTS, groups=1)


def group_norm_silu(
    x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor | None, *ends: Any,  # noqa: ANN401
) -> Tensor:  # fmt: skip
    """Measure the frames unless `statistics` are given, and write a tile of `out` per program."""
    *window, groups, eps, silu, border = ends
    statistics = shapes.measured(x, statistics, groups, eps, group_norm_statistics)
    window, vectors = (*window, silu, border), (weight, bias, statistics, 1)
    return _write_window(x, window, *vectors, elements=ELEMENTS // 2, groups=groups)


def group_norm_statistics(x: Tensor, out: Tensor, groups: int, eps: float) -> Tensor:
    """Sum blocks of rows, and combine their means and squares."""
    batch, channels, frames, height, width = x.shape
    pixels = height * width
    rows, block, warps = tile(channels, ELEMENTS // 2)
    share = rows * _STEPS
    chunks = blocks(pixels, share)
    partial = x.new_empty((batch * frames, chunks, 2, channels), dtype=torch.float32)
    sizes = {"CHANNELS": channels, "ROWS": rows, "STEPS": _STEPS, "BLOCK": block}
    launch(_sum, frame_grid(chunks, x), x, partial, pixels, *strides(x), warps=warps, **sizes)
    block = power_of_two(channels // groups)
    sizes = {"CHANNELS": channels, "GROUPS": groups, "SHARE": share, "BLOCK": block}
    parts = partial, out, pixels, chunks, float(eps)
    launch(
        _combine, (batch * frames, groups), *parts, CHUNKS=max(1, ELEMENTS // 4 // block), **sizes
    )
    return out


def _write_window(
    x: Tensor,
    window: tuple[Any, ...],
    *vectors: Any,  # noqa: ANN401, as those of the kernel
    elements: int,
    groups: int,
) -> Tensor:
    """Write a tile per program to a window: tail, `out`, codes, saturated, SiLU and border."""
    tail, out, codes, saturated, silu, border = window
    channels, frames, width = x.shape[1], x.shape[2], x.shape[4]
    pixels = out.shape[3] * out.shape[4]
    rows, block, warps = tile(channels, elements)
    launch(
        _norm,
        frame_grid(blocks(pixels, rows), x, out),
        *(x, out if tail is None else tail, out, codes, saturated),
        *(pixels, frames, 0 if tail is None else tail.shape[2], width),
        *strides(x), *strides(tail), *strides(out), *vectors,
        warps=warps, CHANNELS=channels, GROUPS=groups, ROOT=math.sqrt(channels), SILU=silu,
        BORDER=border, ZERO=zero_of(out.dtype), ROWS=rows, BLOCK=block,
    )  # fmt: skip
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


@triton.jit(do_not_specialize=["pixels", "frames", "known", "width", "given"])
def _norm(
    x, tail, out, codes, saturated, pixels, frames, known, width,
    x_batch, x_frame, tail_batch, tail_frame, out_batch, out_frame, scales, bias, statistics, given,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, ROOT: tl.constexpr, SILU: tl.constexpr,
    BORDER: tl.constexpr, ZERO: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write some pixels of one new frame and its share of the tail; no statistics: an RMS norm."""
    # `pixels` are those of a frame of `out`, `width` is that of a frame without border, in which
    # the start of the tile can lie outside.
    first = tl.program_id(0) * ROWS
    row, channel = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    exists = channel < CHANNELS
    mask = (first + row < pixels)[:, None] & exists[None, :]
    at = row[:, None] * CHANNELS + channel[None, :]
    start = first.to(tl.int64) * CHANNELS
    source, held, origin = at, mask, start
    if BORDER:
        wide = width + 2 * BORDER
        top, left = first // wide, first % wide
        pixel = first + row
        j, i = pixel // wide, pixel % wide
        inside = (pixel >= BORDER * wide) & (pixel < pixels - BORDER * wide)
        inside = inside & (i >= BORDER) & (i < wide - BORDER)
        held = inside[:, None] & exists[None, :]
        source = ((j - top) * width + (i - left))[:, None] * CHANNELS + channel[None, :]
        origin = ((top - BORDER).to(tl.int64) * width + (left - BORDER)) * CHANNELS

    frame, video = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x += video * x_batch + frame * x_frame + origin
    v = tl.load(x + source, mask=held, other=0).to(tl.float32)
    scale = tl.load(scales + channel, mask=exists, other=0).to(tl.float32)
    offset = tl.load(bias + channel, mask=channel < given * CHANNELS, other=0).to(tl.float32)
    if statistics is None:
        v += offset[None, :]
        norm = tl.sqrt_rn(tl.sum(v * v, axis=1))
        norm = tl.where(norm < 1e-12, 1e-12, norm)  # not `maximum`, which drops NaN
        y = v * (1.0 / norm)[:, None] * (scale * ROOT)[None, :]
    else:
        group = channel // (CHANNELS // GROUPS)
        statistics += (video * frames + frame) * (2 * GROUPS)
        mean = tl.load(statistics + group, mask=exists, other=0)
        scale *= tl.load(statistics + GROUPS + group, mask=exists, other=0)
        y = (v - mean[None, :]) * scale[None, :] + offset[None, :]
    if SILU:
        y = silu_of(y)
    if codes is not None:
        steps = tl.load(codes + channel, mask=exists, other=0)
        y = encoded(y, steps, saturated, held, ZERO, out.dtype.element_ty)
    else:
        if BORDER:
            y = tl.where(held, y, 0.0)
        y = narrow(y, out.dtype.element_ty)

    out += video * out_batch + start
    tail += video * tail_batch + origin
    last = frame + known - frames  # negative for all frames without a tail
    tl.store(out + (known + frame) * out_frame + at, y, mask=mask)
    if last >= 0:
        # The program of a new frame that becomes frame `last` of the tail does every `frames`-th
        # frame up to it, so no other program reads or writes these.
        for k in range(last % frames, last + 1, frames):
            old = tl.load(tail + k * tail_frame + source, mask=held, other=0)
            if ZERO:
                # Not as `other`: Triton 3.6 extends a negative one of 8 bits over its neighbours,
                # so three of four codes were -1 (H200, 2026-11).
                tl.store(out + k * out_frame + at, old, mask=held)
                zero = tl.full(at.shape, ZERO, out.dtype.element_ty)
                tl.store(out + k * out_frame + at, zero, mask=mask & (held == 0))
            else:
                tl.store(out + k * out_frame + at, old, mask=mask)
            # The threads of a program may divide the values differently for loads and stores.
            tl.debug_barrier()
            if k >= frames:
                tl.store(tail + (k - frames) * tail_frame + source, old, mask=held)
        tl.store(tail + last * tail_frame + source, y, mask=held)
