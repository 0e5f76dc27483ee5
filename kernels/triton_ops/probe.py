"""The smallest kernel of all, which shows whether anything can be compiled and run."""

# ruff: noqa: ANN001, ANN201, N803 (kernels: Triton's types, constants in capitals)

import triton
import triton.language as tl


@triton.jit
def probe(out, COUNT: tl.constexpr):
    """Count to `COUNT`."""
    place = tl.arange(0, COUNT)
    tl.store(out + place, place)
