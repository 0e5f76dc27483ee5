"""The Triton kernel of the convolution for chips that load patches of a frame with descriptors.

The product is that of `convolution_kernels.py`: its rows are the pixels of a patch, and a step of
its sum is a block of channels of one tap. The hardware computes the addresses of a patch from its
first pixel (tensor memory access of sm_90 and later), and fills what lies outside the frame with
zeros, which is the padding.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806 (kernels: Triton's types, constants in capitals)

import triton
import triton.language as tl

from .convolution_kernels import finish, product


@triton.jit
def _sums(
    total_0, total_1, source, weight_0, weight_1, start, stop, video, moment, y, x, channel,
    C_IN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Add the products of steps `start` to `stop`, whose frames are all in `source`."""
    PARTS: tl.constexpr = C_IN // K
    for step in range(start, stop):
        tap = step // PARTS
        row, column, part = tap // KW % KH, tap % KW, step % PARTS * K  # pyright: ignore
        a = source.load([video, moment + tap // (KH * KW), y + row, x + column, part])
        a = a.reshape(ROWS * COLUMNS, K)
        total_0 = product(a, weight_0.load([channel, step * K]).T, total_0, HALF)
        if N1 > 0:
            total_1 = product(a, weight_1.load([channel + N0, step * K]).T, total_1, HALF)
    return total_0, total_1


@triton.jit(
    do_not_specialize=[
        "frames", "known", "height", "width", "given",
        "residual_batch", "residual_frame", "out_batch", "out_frame",
    ]
)  # fmt: skip
def convolve_patches(
    out, x, tail, weight_0, weight_1, bias, residual, residual_bias, gamma,
    frames, known, height, width, given,
    residual_batch, residual_frame, out_batch, out_frame,
    C_IN: tl.constexpr, C_OUT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    OUT_UNIT: tl.constexpr, ROOT: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute `ROWS` x `COLUMNS` pixels of a frame for `N0 + N1` output channels."""
    # `x` and `tail` describe `[B, T, H, W, C]`, `weight_0` and `weight_1` describe `[C_out, (kt,
    # kh, kw, C_in)]`. `height` and `width` are those of the result. Programs have the order of
    # those of `convolve`.
    TILES: tl.constexpr = (C_OUT + N0 + N1 - 1) // (N0 + N1)
    STEPS: tl.constexpr = KH * KW * (C_IN // K)
    program = tl.program_id(0)
    channel = program % TILES * (N0 + N1)
    program //= TILES
    frame = program % frames
    program //= frames
    across = (width + COLUMNS - 1) // COLUMNS
    top, left = program // across * ROWS, program % across * COLUMNS
    video = tl.program_id(1)

    total_0 = tl.zeros([ROWS * COLUMNS, N0], tl.float32)
    total_1 = total_0
    if N1 > 0:
        total_1 = tl.zeros([ROWS * COLUMNS, N1], tl.float32)
    # Loads of a loop have one descriptor, so taps of the tail and of `x` have a loop each.
    split = tl.minimum(tl.maximum(known - frame, 0), KT) * STEPS
    total_0, total_1 = _sums(
        total_0, total_1, tail, weight_0, weight_1, 0, split,
        video, frame, top - PH, left - PW, channel,
        C_IN, KH, KW, HALF, ROWS, COLUMNS, N0, N1, K,
    )  # fmt: skip
    total_0, total_1 = _sums(
        total_0, total_1, x, weight_0, weight_1, split, KT * STEPS,
        video, frame - known, top - PH, left - PW, channel,
        C_IN, KH, KW, HALF, ROWS, COLUMNS, N0, N1, K,
    )  # fmt: skip

    row, column = tl.arange(0, ROWS * COLUMNS) // COLUMNS, tl.arange(0, ROWS * COLUMNS) % COLUMNS
    there = (top + row < height) & (left + column < width)
    batch, moment = video.to(tl.int64), frame.to(tl.int64)
    start = (top.to(tl.int64) * width + left) * C_OUT
    out += (batch * out_batch + moment * out_frame) * OUT_UNIT + start
    residual += (batch * residual_batch + moment * residual_frame) * OUT_UNIT + start
    finish(
        total_0, total_1, channel, row * width + column, there,
        bias, residual, residual_bias, gamma, out, given, C_OUT, ROOT, NORM, N0, N1,
    )  # fmt: skip
