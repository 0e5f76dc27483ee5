"""Functions that kernels share: rounding of a result, to a dtype or to codes, SiLU, and terms."""

# ruff: noqa: ANN001, ANN201, N803 (kernels: Triton's types, constants in capitals)

import triton
import triton.language as tl

from ..codes import ZERO as ZERO_CODE
from .runtime import interpreted

INTERPRETED = tl.constexpr(interpreted())

# The first and the last code, as distances from the code of 0.
_FIRST = tl.constexpr(-float(ZERO_CODE))
_LAST = tl.constexpr(255.0 - ZERO_CODE)

# Float32 of this size has no fraction, so a sum with it is rounded to the nearest even integer. Its
# low byte is 0, so that of the sum is the integer. AMD GPUs and the interpreter round the same way.
_WHOLE = tl.constexpr(1.5 * 2**23)

# Added to the sum of a tile's saturated values for a NaN: more than a tile has values.
_NAN = tl.constexpr(1 << 16)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round `x` from float32 to `dtype`, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter truncates to bfloat16.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def silu_of(y):
    """Return `y * sigmoid(y)`: 0 where `exp` overflows, NaN for `-inf`, like the product."""
    return y / (1 + tl.exp(-y))


@triton.jit
def with_terms(
    total, channel, at, rows, bias, residual, residual_bias, given, CHANNELS: tl.constexpr
):
    """Add bias, residual of `rows` and its bias, in turn, those that `given` has a bit for."""
    wanted = channel < (given & 1) * CHANNELS
    total += tl.load(bias + channel, mask=wanted, other=0).to(tl.float32)[None, :]
    wanted = channel < (given >> 1 & 1) * CHANNELS
    total += tl.load(residual + at, mask=rows & wanted[None, :], other=0).to(tl.float32)
    wanted = channel < (given >> 2) * CHANNELS
    total += tl.load(residual_bias + channel, mask=wanted, other=0).to(tl.float32)[None, :]
    return total


@triton.jit
def encoded(y, codes, saturated, held, ZERO: tl.constexpr, dtype: tl.constexpr):
    """Round a float32 tile `[ROWS, BLOCK]` to codes, and count the values that have none."""
    # `codes` `[BLOCK]` are codes per unit. Values outside of the codes and NaN are added to
    # `saturated` `[2]` in memory. Only values that are `held` count; the others have the code of 0.
    v = y * codes[None, :]
    missing = held & (v != v)
    v = tl.where(held & (v == v), v, 0.0)
    whole = tl.minimum(tl.maximum(v, _FIRST), _LAST) + _WHOLE
    y = (whole.to(tl.int32, bitcast=True) + ZERO).to(dtype)
    # `rint` rounds the half below the first code, -17.5, out of the codes, and 238.5 into them.
    outside = (v <= _FIRST - 0.5) | (v > _LAST + 0.5)
    # One reduction for both counts.
    counts = tl.sum(tl.sum(tl.where(missing, _NAN, outside.to(tl.int32)), axis=1), axis=0)
    counts = counts.to(tl.int64)
    over, lost = counts % _NAN, counts // _NAN
    tl.atomic_add(saturated, over, mask=over > 0, sem="relaxed")
    tl.atomic_add(saturated + 1, lost, mask=lost > 0, sem="relaxed")
    return y
