"""Functions that all kernels share: rounding of a result, and SiLU."""

# ruff: noqa: ANN001, ANN201 (kernels: Triton's types, constants in capitals)

import triton
import triton.language as tl

from .runtime import interpreted

INTERPRETED = tl.constexpr(interpreted())


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
