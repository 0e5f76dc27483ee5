"""Ops on independent rows: norms over the channels of a pixel, gates and sums.

A kernel has one variant for all combinations of its optional tensors, because Triton takes a second
to compile each. A missing tensor is replaced by another one that is not read: `given` masks it.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803 (kernels: Triton's types, constants in capitals)

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..codes import zero_of
from ..constraints import refuse_overlap, refuse_rows, row_distance, video_target, window_of
from .runtime import launch
from .scalars import encoded, narrow, silu_of
from .tiles import blocks, dense, given, refuse_sizes, refuse_span, strides, tile


def rms_norm_silu(
    x: Tensor,
    gamma: Tensor,
    *,
    silu: bool = True,
    bias: Tensor | None = None,
    **written: Any,  # noqa: ANN401, those of `window_of`
) -> Tensor:
    """Normalise the pixels of a tile per program, each in one pass over its channels."""
    refuse_sizes(x)
    tail, out, border, codes, saturated = window_of(x, **written)
    refuse_sizes(out)
    batch, channels, frames, _, width = x.shape
    pixels = out.shape[3] * out.shape[4]
    rows, block, warps = tile(channels)
    gamma = dense(gamma)
    launch(
        _rms_norm_silu,
        (blocks(pixels, rows), frames, batch),
        x, gamma, gamma if bias is None else dense(bias), out if tail is None else tail, out,
        None if codes is None else dense(codes), saturated,
        pixels, frames, 0 if tail is None else tail.shape[2], width, given(bias),
        *strides(x), *strides(tail), *strides(out),
        warps=warps, CHANNELS=channels, ROOT=math.sqrt(channels), SILU=silu, BORDER=border,
        ZERO=zero_of(out.dtype), ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return out


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gate a block of rows and channels per program."""
    refuse_rows(x=x, gate=gate, out=out)
    refuse_overlap(out, x=x, gate=gate, same=True)
    out = x.new_empty(x.shape) if out is None else out
    channels = x.shape[-1]
    count = x.numel() // channels
    rows, block, warps = tile(min(channels, 1024))
    distances = row_distance(x), row_distance(gate), row_distance(out)
    refuse_span(*(distance * rows for distance in distances))
    launch(
        _silu_mul,
        (blocks(count, rows), blocks(channels, block)),
        *(x, gate, out, count, *distances),
        warps=warps,
        CHANNELS=channels,
        ROWS=rows,
        BLOCK=block,
    )
    return out


def bias_residual(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add the terms to a tile per program."""
    out = video_target(x.shape, out, x=x, residual=residual, same=True)
    refuse_sizes(x)
    batch, channels, frames, height, width = x.shape
    pixels = height * width
    rows, block, warps = tile(channels)
    numbers = [dense(each) for each in (bias, residual_bias) if each is not None] or [x]
    launch(
        _bias_residual,
        (blocks(pixels, rows), frames, batch),
        *(x, numbers[0], x if residual is None else residual, numbers[-1], out),
        *(pixels, given(bias, residual, residual_bias)),
        *(step for each in (x, residual, out) for step in strides(each)),
        warps=warps,
        CHANNELS=channels,
        ROWS=rows,
        BLOCK=block,
    )
    return out


@triton.jit
def interior(first, row, pixels, width, BORDER: tl.constexpr):
    """Return the place of a tile in frames without border, distances from it, what is inside."""
    # `first` is a pixel in a frame of `out`, `row` `[ROWS]` counts from it, `pixels` are those of a
    # frame of `out`, `width` is without border. The place can lie outside.
    wide = width + 2 * BORDER
    top, left = first // wide, first % wide
    pixel = first + row
    y, x = pixel // wide, pixel % wide
    inside = (pixel >= BORDER * wide) & (pixel < pixels - BORDER * wide)
    inside = inside & (x >= BORDER) & (x < wide - BORDER)
    place = (top - BORDER).to(tl.int64) * width + (left - BORDER)
    return place, (y - top) * width + (x - left), inside


@triton.jit
def roll(
    tail, out, tail_frame, out_frame, last, frames, source, held, at, mask, ZERO: tl.constexpr
):  # fmt: skip
    """Copy the old tail to the front of `out` and move it by `frames`, for the pixels of a tile."""
    # The program of a new frame that becomes frame `last` of the tail does every `frames`-th frame
    # up to it, so no other program reads or writes these. `source` and `held` are offsets and mask
    # of the tail, and differ from `at` and `mask` of `out` if `out` has a border of `ZERO`.
    for k in range(last % frames, last + 1, frames):
        old = tl.load(tail + k * tail_frame + source, mask=held, other=0)
        if ZERO:
            # Not as `other`: Triton 3.6 extends a negative one of 8 bits over its neighbours, so
            # three of four codes were -1 (H200, 2026-11).
            tl.store(out + k * out_frame + at, old, mask=held)
            zero = tl.full(at.shape, ZERO, out.dtype.element_ty)
            tl.store(out + k * out_frame + at, zero, mask=mask & (held == 0))
        else:
            tl.store(out + k * out_frame + at, old, mask=mask)
        # The threads of a program may divide the values differently for loads and stores.
        tl.debug_barrier()
        if k >= frames:
            tl.store(tail + (k - frames) * tail_frame + source, old, mask=held)


@triton.jit(do_not_specialize=["pixels", "frames", "known", "width", "given"])
def _rms_norm_silu(
    x, gamma, bias, tail, out, codes, saturated, pixels, frames, known, width, given,
    x_batch, x_frame, tail_batch, tail_frame, out_batch, out_frame,
    CHANNELS: tl.constexpr, ROOT: tl.constexpr, SILU: tl.constexpr, BORDER: tl.constexpr,
    ZERO: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    frame = tl.program_id(1).to(tl.int64)
    video = tl.program_id(2).to(tl.int64)
    row, channel = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    exists = channel < CHANNELS
    mask = (first + row < pixels)[:, None] & exists[None, :]
    at = row[:, None] * CHANNELS + channel[None, :]
    start = first.to(tl.int64) * CHANNELS
    source, held, origin = at, mask, start
    if BORDER:
        place, moved, inside = interior(first, row, pixels, width, BORDER)
        source = moved[:, None] * CHANNELS + channel[None, :]
        held, origin = inside[:, None] & exists[None, :], place * CHANNELS

    x += video * x_batch + frame * x_frame + origin
    v = tl.load(x + source, mask=held, other=0).to(tl.float32)
    wanted = channel < given * CHANNELS
    v += tl.load(bias + channel, mask=wanted, other=0).to(tl.float32)[None, :]
    norm = tl.sqrt_rn(tl.sum(v * v, axis=1))
    norm = tl.where(norm < 1e-12, 1e-12, norm)  # not `maximum`, which drops NaN
    scale = tl.load(gamma + channel, mask=exists, other=0).to(tl.float32) * ROOT
    y = v * (1.0 / norm)[:, None] * scale[None, :]
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
        roll(tail, out, tail_frame, out_frame, last, frames, source, held, at, mask, ZERO)
        tl.store(tail + last * tail_frame + source, y, mask=held)


@triton.jit(do_not_specialize=["count"])
def _silu_mul(
    x, gate, out, count, x_row, gate_row, out_row,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, channel = tl.arange(0, ROWS)[:, None], tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = channel[None, :]
    mask = (first + row < count) & (channel < CHANNELS)

    x += first * x_row + (row * x_row + channel)
    gate += first * gate_row + (row * gate_row + channel)
    out += first * out_row + (row * out_row + channel)
    y = silu_of(tl.load(x, mask=mask, other=0).to(tl.float32))
    y *= tl.load(gate, mask=mask, other=0).to(tl.float32)
    tl.store(out, narrow(y, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pixels", "given"])
def _bias_residual(
    x, bias, residual, residual_bias, out, pixels, given,
    x_batch, x_frame, residual_batch, residual_frame, out_batch, out_frame,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    frame = tl.program_id(1).to(tl.int64)
    video = tl.program_id(2).to(tl.int64)
    row, channel = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    exists = channel < CHANNELS
    mask = (first + row < pixels)[:, None] & exists[None, :]
    at = row[:, None] * CHANNELS + channel[None, :]
    start = first.to(tl.int64) * CHANNELS

    x += video * x_batch + frame * x_frame + start
    v = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    wanted = channel < (given & 1) * CHANNELS
    v += tl.load(bias + channel, mask=wanted, other=0).to(tl.float32)[None, :]
    residual += video * residual_batch + frame * residual_frame + start
    wanted = channel < (given >> 1 & 1) * CHANNELS
    v += tl.load(residual + at, mask=mask & wanted[None, :], other=0).to(tl.float32)
    wanted = channel < (given >> 2) * CHANNELS
    v += tl.load(residual_bias + channel, mask=wanted, other=0).to(tl.float32)[None, :]
    out += video * out_batch + frame * out_frame + start
    tl.store(out + at, narrow(v, out.dtype.element_ty), mask=mask)
