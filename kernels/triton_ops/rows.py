"""Ops on independent rows: norms over the channels of a pixel, gates and sums.

A kernel has one variant for all combinations of its optional tensors, because Triton takes a second
to compile each. A missing tensor is replaced by another one that is not read: `given` masks it.
"""

# ruff: noqa: ANN001, ANN202, N803 (kernels: Triton's types, constants in capitals)

import math

import triton
import triton.language as tl
from torch import Tensor

from ..constraints import row_distance
from .runtime import launch
from .scalars import narrow, silu_of, with_terms
from .tiles import blocks, frame_grid, given, refuse_span, strides, tile
from .windows import tile_at, write_tile, write_window


def rms_norm_silu(
    x: Tensor,
    gamma: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    out: Tensor,
    codes: Tensor | None,
    saturated: Tensor | None,
    silu: bool,
    border: int,
) -> Tensor:
    """Normalise the pixels of a tile per program, each in one pass over its channels."""
    return write_window(
        _rms_norm_silu, x, (tail, out, codes, saturated),
        gamma, gamma if bias is None else bias, given(bias),
        border=border, SILU=silu, ROOT=math.sqrt(x.shape[1]),
    )  # fmt: skip


def silu_mul(x: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """Gate a block of rows and channels per program."""
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
    bias: Tensor | None,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Add the terms to a tile per program."""
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


@triton.jit(do_not_specialize=["pixels", "frames", "known", "width", "given"])
def _rms_norm_silu(
    x, tail, out, codes, saturated, pixels, frames, known, width,
    x_batch, x_frame, tail_batch, tail_frame, out_batch, out_frame, gamma, bias, given,
    CHANNELS: tl.constexpr, ROOT: tl.constexpr, SILU: tl.constexpr, BORDER: tl.constexpr,
    ZERO: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel, start, at, mask, origin, source, held = tile_at(
        pixels, width, CHANNELS, BORDER, ROWS, BLOCK
    )
    x += tl.program_id(2).to(tl.int64) * x_batch + tl.program_id(1).to(tl.int64) * x_frame + origin
    v = tl.load(x + source, mask=held, other=0).to(tl.float32)
    wanted = channel < given * CHANNELS
    v += tl.load(bias + channel, mask=wanted, other=0).to(tl.float32)[None, :]
    norm = tl.sqrt_rn(tl.sum(v * v, axis=1))
    norm = tl.where(norm < 1e-12, 1e-12, norm)  # not `maximum`, which drops NaN
    scale = tl.load(gamma + channel, mask=channel < CHANNELS, other=0).to(tl.float32) * ROOT
    write_tile(
        v * (1.0 / norm)[:, None] * scale[None, :], channel, start, at, mask, origin, source, held,
        tail, out, codes, saturated, frames, known, tail_batch, tail_frame, out_batch, out_frame,
        CHANNELS, SILU, BORDER, ZERO,
    )  # fmt: skip


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
    channel, start, at, mask, _, _, _ = tile_at(pixels, 0, CHANNELS, tl.constexpr(0), ROWS, BLOCK)
    frame, video = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x += video * x_batch + frame * x_frame + start
    residual += video * residual_batch + frame * residual_frame + start
    v = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    v = with_terms(v, channel, at, mask, bias, residual, residual_bias, given, CHANNELS)
    out += video * out_batch + frame * out_frame + start
    tl.store(out + at, narrow(v, out.dtype.element_ty), mask=mask)
