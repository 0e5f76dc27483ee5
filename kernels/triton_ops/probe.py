"""The smallest kernel, which tests whether Triton compiles and runs kernels."""

# ruff: noqa: ANN001, ANN201, N803 (kernels: Triton's types, constants in capitals)

import triton
import triton.language as tl


@triton.jit
def probe(out, COUNT: tl.constexpr):
    """Write 0 to `COUNT` - 1 to `out`."""
    place = tl.arange(0, COUNT)
    tl.store(out + place, place)
