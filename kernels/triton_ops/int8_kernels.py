"""The Triton kernel of the int8 convolution: an implicit matrix product with sums in int32.

Rows of the product are pixels of one result frame, columns are output channels, and the summed
dimension is `(kt, kh, kw, C_in)`, as in `convolution_kernels.py`. Tail and border are in memory, so
no load has a condition. The code of zero leaves the sums after the loop: `sum((x - zero) * w)` is
`sum(x * w) - zero * sum(w)`, exact in int32.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806 (kernels: Triton's types, constants in capitals)

import triton
import triton.language as tl

from .convolution_kernels import weight_offsets, weight_rows
from .scalars import narrow, with_terms


@triton.jit
def _finish(
    total, channel, pixel, there, sums, scale, bias, residual, residual_bias, out, given,
    ZERO: tl.constexpr, C_OUT: tl.constexpr,
):  # fmt: skip
    """Subtract the zero, scale, add the terms, round once, and write; int32 is not scaled."""
    # A block of channels is written before the next one, so that its values leave the registers.
    wanted = channel < C_OUT
    total -= tl.load(sums + channel, mask=wanted, other=0)[None, :] * ZERO
    at = pixel[:, None] * C_OUT + channel[None, :]
    mask = there[:, None] & wanted[None, :]
    if out.dtype.element_ty == tl.int32:
        tl.store(out + at, total, mask=mask)
    else:
        factor = tl.load(scale + channel, mask=wanted, other=0).to(tl.float32)
        y = total.to(tl.float32) * factor[None, :]
        y = with_terms(y, channel, at, there[:, None], bias, residual, residual_bias, given, C_OUT)
        # The threads of a program may divide the values differently for loads and stores.
        tl.debug_barrier()
        tl.store(out + at, narrow(y, out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "frames", "width", "out_width", "pixels", "summed", "given", "x_batch", "x_frame",
        "residual_batch", "residual_frame", "out_batch", "out_frame",
    ]
)  # fmt: skip
def convolve_codes(
    x, weight, sums, scale, bias, residual, residual_bias, out,
    frames, width, out_width, pixels, summed, given, x_batch, x_frame,
    residual_batch, residual_frame, out_batch, out_frame,
    C_IN: tl.constexpr, C_OUT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ZERO: tl.constexpr,
    IN_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, CACHE: tl.constexpr,
    M: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute `M` adjacent pixels of a frame for `N0 + N1` output channels."""
    # Programs of the same pixels are adjacent, for all their output channels, then for all frames,
    # and strides have the units of `convolve`. If `K` divides the channels, an iteration has one
    # tap and its place is computed once per program. The taps of a kernel row follow each other
    # then for one part of the channels: two of three pixels are in the L1 cache. Otherwise an
    # iteration crosses taps, and each group of `IN_UNIT` values has its place.
    SUMMED: tl.constexpr = KT * KH * KW * C_IN
    ROW: tl.constexpr = KW * C_IN
    # An iteration with one tap; the constant first, as in `convolve`.
    PARTS: tl.constexpr = C_IN // K
    WHOLE: tl.constexpr = PARTS * K == C_IN
    TILES: tl.constexpr = (C_OUT + N0 + N1 - 1) // (N0 + N1)
    program = tl.program_id(0)
    channel = program % TILES * (N0 + N1)
    program //= TILES
    frame = program % frames
    first = program // frames * M
    video = tl.program_id(1).to(tl.int64)

    # Rows after the last pixel repeat it.
    pixel = tl.minimum(first + tl.arange(0, M), pixels - 1)
    y = pixel // out_width
    top = first // out_width
    place = ((y - top) * width + pixel - y * out_width) * C_IN
    x_frame = x_frame.to(tl.int64) * IN_UNIT
    x += video * x_batch * IN_UNIT + frame * x_frame + top.to(tl.int64) * width * C_IN

    k = tl.arange(0, K)
    weight_0 = weight_offsets(channel + tl.arange(0, N0), k, SUMMED, C_OUT, N0 + N1)
    total_0 = tl.zeros([M, N0], tl.int32)
    weight_1 = weight_0
    total_1 = total_0
    if N1 > 0:
        weight_1 = weight_offsets(channel + N0 + tl.arange(0, N1), k, SUMMED, C_OUT, N0 + N1)
        total_1 = tl.zeros([M, N1], tl.int32)
    near = place[:, None] + k[None, :]
    # Not a constant: the compiler would unroll few iterations, and registers would spill.
    for step in range(0, summed, K):
        if WHOLE:
            # The compiler must know that the place is a multiple of `K`.
            tap, part = step // K % KW, step // K // KW % PARTS
            row, run = step // ROW, tap * C_IN + part * K
            source = x + (row // KH * x_frame + row % KH * width * C_IN + run)
            a = tl.load(source + near, cache_modifier=CACHE)  # pyright: ignore
            start = row * ROW + run
        else:
            k = step + tl.arange(0, K)
            row, run = k // ROW, k % ROW
            source = x + (row // KH * x_frame + row % KH * (width * C_IN) + run)
            # The remainder hides from the compiler that values in a row are adjacent and aligned.
            source = tl.max_contiguous(tl.multiple_of(source, IN_UNIT), IN_UNIT)
            at = source[None, :] + place[:, None]
            if SUMMED % K != 0:
                a = tl.load(at, mask=(k < SUMMED)[None, :], other=0, cache_modifier=CACHE)  # pyright: ignore
            else:
                a = tl.load(at, cache_modifier=CACHE)  # pyright: ignore
            start = step
        b = weight_rows(weight + start, weight_0, SUMMED - start, SUMMED, K)
        total_0 = tl.dot(a, b, total_0, out_dtype=tl.int32)
        if N1 > 0:
            b = weight_rows(weight + start, weight_1, SUMMED - start, SUMMED, K)
            total_1 = tl.dot(a, b, total_1, out_dtype=tl.int32)

    skipped = frame.to(tl.int64)
    corner = first.to(tl.int64) * C_OUT
    out += (video * out_batch + skipped * out_frame) * OUT_UNIT + corner
    residual += (video * residual_batch + skipped * residual_frame) * OUT_UNIT + corner
    row = tl.arange(0, M)
    there = first + row < pixels
    _finish(
        total_0, channel + tl.arange(0, N0), row, there,
        sums, scale, bias, residual, residual_bias, out, given, ZERO, C_OUT,
    )  # fmt: skip
    if N1 > 0:
        _finish(
            total_1, channel + N0 + tl.arange(0, N1), row, there,
            sums, scale, bias, residual, residual_bias, out, given, ZERO, C_OUT,
        )  # fmt: skip
