"""What all kernels share: the rounding of a result, and SiLU."""

# ruff: noqa: ANN001, ANN201 (kernels: Triton's types, constants in capitals)

import triton
import triton.language as tl

from .runtime import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round float32 to a dtype, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter cuts the lower half off.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def silu_of(y):
    """`y * sigmoid(y)`. Where `exp` overflows it is zero, and NaN for `-inf`, as the product is."""
    return y / (1 + tl.exp(-y))
