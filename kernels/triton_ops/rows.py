"""Ops on independent rows: gates and sums.

A kernel has one variant for all combinations of its optional tensors, because Triton takes a second
to compile each. A missing tensor is replaced by another one that is not read: `given` masks it.
"""

# ruff: noqa: ANN001, ANN202, N803 (kernels: Triton's types, constants in capitals)

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..constraints import row_distance
from .runtime import launch
from .scalars import narrow, silu_of, with_terms
from .tiles import blocks, frame_grid, given, refuse_span, strides, tile


def silu_mul(x: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """Gate a block of rows and channels per program."""
    channels = x.shape[-1]
    count = x.numel() // channels
    rows, block, warps = tile(min(channels, 1024))
    distances = row_distance(x), row_distance(gate), row_distance(out)
    refuse_span(*(distance * rows for distance in distances))
    grid, sizes = (blocks(count, rows), blocks(channels, block)), (x, gate, out, count, *distances)
    launch(_silu_mul, grid, *sizes, warps=warps, CHANNELS=channels, ROWS=rows, BLOCK=block)
    return out


def bias_residual(x: Tensor, *terms: Any) -> Tensor:  # noqa: ANN401
    """Add the terms to a tile per program."""
    bias, residual, residual_bias, out = terms
    channels, pixels = x.shape[1], x.shape[3] * x.shape[4]
    rows, block, warps = tile(channels)
    numbers = [each for each in (bias, residual_bias) if each is not None] or [x]
    launch(
        _bias_residual,
        frame_grid(blocks(pixels, rows), x),
        *(x, numbers[0], x if residual is None else residual, numbers[-1], out),
        *(pixels, given(bias, residual, residual_bias)),
        *strides(x), *strides(residual), *strides(out),
        warps=warps, CHANNELS=channels, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return out


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
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)
    there = first + row < pixels
    mask, at = there & (channel < CHANNELS)[None, :], row * CHANNELS + channel[None, :]
    frame, video = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = first.to(tl.int64) * CHANNELS
    x += video * x_batch + frame * x_frame + start
    residual += video * residual_batch + frame * residual_frame + start
    v = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    v = with_terms(v, channel, at, there, bias, residual, residual_bias, given, CHANNELS)
    out += video * out_batch + frame * out_frame + start
    tl.store(out + at, narrow(v, out.dtype.element_ty), mask=mask)
