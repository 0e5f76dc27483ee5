"""The tiles of the norms: where they are, and how they are written to `out` and the tail."""

# ruff: noqa: ANN001, ANN201, N803 (kernels: Triton's types, constants in capitals)

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..codes import zero_of
from .runtime import launch
from .scalars import encoded, narrow, silu_of
from .tiles import ELEMENTS, blocks, frame_grid, strides, tile


def write_window(
    kernel: Any,  # noqa: ANN401, what triton.jit makes
    x: Tensor,
    window: tuple[Tensor | None, Tensor, Tensor | None, Tensor | None],
    *args: Any,  # noqa: ANN401, those of the kernel
    border: int,
    elements: int = ELEMENTS,
    **constants: Any,  # noqa: ANN401, those of the kernel
) -> Tensor:
    """Write a tile of about `elements` per program to a window: tail, `out`, codes, saturated."""
    tail, out, codes, saturated = window
    channels, frames, width = x.shape[1], x.shape[2], x.shape[4]
    pixels = out.shape[3] * out.shape[4]
    rows, block, warps = tile(channels, elements)
    launch(
        kernel,
        frame_grid(blocks(pixels, rows), x, out),
        *(x, out if tail is None else tail, out, codes, saturated),
        *(pixels, frames, 0 if tail is None else tail.shape[2], width),
        *strides(x), *strides(tail), *strides(out), *args,
        warps=warps, CHANNELS=channels, BORDER=border, ZERO=zero_of(out.dtype),
        ROWS=rows, BLOCK=block, **constants,
    )  # fmt: skip
    return out


@triton.jit
def tile_at(
    pixels, width, CHANNELS: tl.constexpr, BORDER: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return channels, then start, offsets and mask of a tile of `out`, and those of frames."""
    # `pixels` are those of a frame of `out`, `width` is that of a frame without border, in which
    # the start can lie outside.
    first = tl.program_id(0) * ROWS
    row, channel = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    exists = (channel < CHANNELS)[None, :]
    mask = (first + row < pixels)[:, None] & exists
    at = row[:, None] * CHANNELS + channel[None, :]
    start = first.to(tl.int64) * CHANNELS
    source, held, origin = at, mask, start
    if BORDER:
        wide = width + 2 * BORDER
        top, left = first // wide, first % wide
        pixel = first + row
        y, x = pixel // wide, pixel % wide
        inside = (pixel >= BORDER * wide) & (pixel < pixels - BORDER * wide)
        inside = inside & (x >= BORDER) & (x < wide - BORDER)
        held = inside[:, None] & exists
        source = ((y - top) * width + (x - left))[:, None] * CHANNELS + channel[None, :]
        origin = ((top - BORDER).to(tl.int64) * width + (left - BORDER)) * CHANNELS
    return channel, start, at, mask, origin, source, held


@triton.jit
def write_tile(
    y, channel, start, at, mask, origin, source, held, tail, out, codes, saturated, frames, known,
    tail_batch, tail_frame, out_batch, out_frame,
    CHANNELS: tl.constexpr, SILU: tl.constexpr, BORDER: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Apply SiLU, round, write a tile of a new frame, and move the tail at its pixels."""
    if SILU:
        y = silu_of(y)
    if codes is not None:
        steps = tl.load(codes + channel, mask=channel < CHANNELS, other=0)
        y = encoded(y, steps, saturated, held, ZERO, out.dtype.element_ty)
    else:
        if BORDER:
            y = tl.where(held, y, 0.0)
        y = narrow(y, out.dtype.element_ty)

    frame = tl.program_id(1).to(tl.int64)
    video = tl.program_id(2).to(tl.int64)
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
