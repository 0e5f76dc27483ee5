"""The Triton kernel of the convolution: an implicit matrix product over taps and channels.

Rows of the product are pixels of one result frame, columns are output channels, and the summed
dimension is `(kt, kh, kw, C_in)`, as the weight lies in channels-last memory. The values of the
taps of one kernel row are adjacent in a frame too. No program copies the window: a step reads each
of its columns from the tail or from the new frames.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806 (kernels: Triton's types, constants in capitals)

import triton
import triton.language as tl

from .scalars import INTERPRETED, narrow, silu_of, with_terms


@triton.jit
def product(a, b, total, HALF: tl.constexpr):
    """Add `a @ b` to `total`. With `HALF` the tensor cores sum the products in float16."""
    if HALF:
        total += tl.dot(a, b, out_dtype=tl.float16).to(tl.float32)
    elif INTERPRETED:
        # The interpreter multiplies bfloat16 incorrectly.
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(wide_a, wide_b, total, input_precision="ieee")
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def weight_offsets(channel, k, SUMMED: tl.constexpr, C_OUT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets of rows `k` of the weight; channels after the last repeat it."""
    if C_OUT % WIDTH != 0:
        # Without it, the offsets from channel to channel are constants in the loads.
        channel = tl.minimum(channel, C_OUT - 1)
    return channel[None, :] * SUMMED + k[:, None]


@triton.jit
def weight_rows(weight, at, left, SUMMED: tl.constexpr, K: tl.constexpr):
    """Load `K` rows of the weight, of which `left` exist."""
    there = (tl.arange(0, K) < left)[:, None]
    at += weight
    return tl.load(at) if SUMMED % K == 0 else tl.load(at, mask=there, other=0)


@triton.jit
def _squares(total, channel, C_OUT: tl.constexpr):
    """Return the sum of squares of each row, without the channels of the block's end."""
    return tl.sum(tl.where((channel < C_OUT)[None, :], total * total, 0.0), 1)


@triton.jit
def _normed(total, channel, inverse, gamma, ROOT: tl.constexpr, C_OUT: tl.constexpr):
    scale = tl.load(gamma + channel, mask=channel < C_OUT, other=0).to(tl.float32) * ROOT
    return silu_of(total * inverse[:, None] * scale[None, :])


@triton.jit
def finish(
    total_0, total_1, pixel, there, bias, residual, residual_bias, gamma, out, given,
    C_OUT: tl.constexpr, ROOT: tl.constexpr, NORM: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr,
):  # fmt: skip
    """Add the terms, apply norm and SiLU, round once, and write a tile."""
    # Each value of the residual is read before the same one of `out` is written, by one program.
    channel_0 = tl.arange(0, N0)
    at_0 = pixel[:, None] * C_OUT + channel_0[None, :]
    rows = there[:, None]
    total_0 = with_terms(
        total_0, channel_0, at_0, rows, bias, residual, residual_bias, given, C_OUT
    )
    if N1 > 0:
        channel_1 = N0 + tl.arange(0, N1)
        at_1 = pixel[:, None] * C_OUT + channel_1[None, :]
        total_1 = with_terms(
            total_1, channel_1, at_1, rows, bias, residual, residual_bias, given, C_OUT
        )
    if NORM:
        norm = _squares(total_0, channel_0, C_OUT)
        if N1 > 0:
            norm += _squares(total_1, channel_1, C_OUT)
        norm = tl.sqrt_rn(norm)
        norm = 1.0 / tl.where(norm < 1e-12, 1e-12, norm)  # not `maximum`, which drops NaN
        total_0 = _normed(total_0, channel_0, norm, gamma, ROOT, C_OUT)
        if N1 > 0:
            total_1 = _normed(total_1, channel_1, norm, gamma, ROOT, C_OUT)
    # The threads of a program may divide the values differently for loads and stores.
    tl.debug_barrier()
    mask = rows & (channel_0 < C_OUT)[None, :]
    tl.store(out + at_0, narrow(total_0, out.dtype.element_ty), mask=mask)
    if N1 > 0:
        mask = rows & (channel_1 < C_OUT)[None, :]
        tl.store(out + at_1, narrow(total_1, out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "frames", "known", "height", "width", "out_width", "pixels", "given",
        "x_batch", "x_frame", "tail_batch", "tail_frame",
        "residual_batch", "residual_frame", "out_batch", "out_frame",
    ]
)  # fmt: skip
def convolve(
    x, tail, weight, bias, residual, residual_bias, gamma, out,
    frames, known, height, width, out_width, pixels, given,
    x_batch, x_frame, tail_batch, tail_frame,
    residual_batch, residual_frame, out_batch, out_frame,
    C_IN: tl.constexpr, C_OUT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ST: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    IN_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    ROOT: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr,
    M: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute `M` adjacent pixels of a frame for all output channels, at most `N0 + N1`."""
    # Programs of the same pixels of all frames are adjacent: they find their inputs in the L2
    # cache. Strides count units of `IN_UNIT` or `OUT_UNIT` values, so that the compiler knows the
    # alignment. Offsets of frames and of the first row of a tile are 64 bits wide, those from there
    # 32.
    SUMMED: tl.constexpr = KT * KH * KW * C_IN
    ROW: tl.constexpr = KW * C_IN
    # The constant first: Triton 3.2 has no operators of a plain integer and a constant.
    UNIT_BYTES: tl.constexpr = IN_UNIT * x.dtype.element_ty.primitive_bitwidth // 8
    program = tl.program_id(0)
    frame = program % frames
    first = program // frames * M
    video = tl.program_id(1).to(tl.int64)

    # Rows after the last pixel repeat it.
    pixel = tl.minimum(first + tl.arange(0, M), pixels - 1)
    y = pixel // out_width
    left = (pixel - y * out_width) * SW - PW
    top = first // out_width
    place = ((y - top) * (SH * width) + left) * C_IN
    # Bit `kh * KW + kw` of a pixel: the tap lies inside the frame.
    inside = tl.zeros([M], tl.int32)
    if PH + PW > 0:
        y = y * SH - PH
        for i in tl.static_range(KH):  # pyright: ignore
            for j in tl.static_range(KW):  # pyright: ignore
                there = (y + i >= 0) & (y + i < height) & (left + j >= 0) & (left + j < width)
                inside |= there.to(tl.int32) << (i * KW + j)
    base = (top * SH - PH).to(tl.int64) * width * C_IN
    x += video * x_batch * IN_UNIT + base
    tail += video * tail_batch * IN_UNIT + base
    tail_frame = tail_frame.to(tl.int64) * IN_UNIT
    x_frame = x_frame.to(tl.int64) * IN_UNIT

    k = tl.arange(0, K)
    weight_0 = weight_offsets(tl.arange(0, N0), k, SUMMED, C_OUT, N0 + N1)
    total_0 = tl.zeros([M, N0], tl.float32)
    weight_1 = weight_0
    total_1 = total_0
    if N1 > 0:
        weight_1 = weight_offsets(N0 + tl.arange(0, N1), k, SUMMED, C_OUT, N0 + N1)
        total_1 = tl.zeros([M, N1], tl.float32)
    for step in range(0, SUMMED, K):
        k = step + tl.arange(0, K)
        # Kernel rows of all frames, and the place in the values of a row's taps.
        row, run = k // ROW, k % ROW
        kh, moment = row % KH, frame * ST + row // KH
        at_tail = tail + moment * tail_frame
        source = tl.where(moment < known, at_tail, x + (moment - known) * x_frame)
        source += kh * (width * C_IN) + run
        # The choice hides from the compiler that values in a row are adjacent and aligned.
        source = tl.max_contiguous(tl.multiple_of(source, UNIT_BYTES), IN_UNIT)
        at = source[None, :] + place[:, None]
        if PH + PW > 0:
            tap = 1 << (kh * KW + run // C_IN)
            if SUMMED % K != 0:
                tap = tl.where(k < SUMMED, tap, 0)
            # Taps do not change within `IN_UNIT` values, a divisor of the channels.
            valid = tl.max_constancy((inside[:, None] & tap[None, :]) != 0, [1, IN_UNIT])
            a = tl.load(at, mask=valid, other=0.0)
        elif SUMMED % K != 0:
            a = tl.load(at, mask=(k < SUMMED)[None, :], other=0.0)
        else:
            a = tl.load(at)
        b = weight_rows(weight + step, weight_0, SUMMED - step, SUMMED, K)
        total_0 = product(a, b, total_0, HALF)
        if N1 > 0:
            b = weight_rows(weight + step, weight_1, SUMMED - step, SUMMED, K)
            total_1 = product(a, b, total_1, HALF)

    skipped = frame.to(tl.int64)
    start = first.to(tl.int64) * C_OUT
    out += (video * out_batch + skipped * out_frame) * OUT_UNIT + start
    residual += (video * residual_batch + skipped * residual_frame) * OUT_UNIT + start
    row = tl.arange(0, M)
    finish(
        total_0, total_1, row, first + row < pixels,
        bias, residual, residual_bias, gamma, out, given, C_OUT, ROOT, NORM, N0, N1,
    )  # fmt: skip
