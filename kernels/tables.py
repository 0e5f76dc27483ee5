"""What serves a convolution on a chip, from rows of `tests/benchmarks/results.jsonl`.

A chip that is not here runs the library's convolutions until `proof.py` has shown that a tile of
ours is faster on the user's own calls. `VAE Benchmark (Fast)` prints what such a chip has shown,
so that its entry can be added.
"""

from collections.abc import Mapping
from typing import NamedTuple

from .backends import Kernel

# Compute capability, or the architecture of an AMD GPU, such as "gfx942".
Chip = tuple[int, int] | str


class Kind(NamedTuple):
    """Convolutions that a chip runs in the same way, at any size."""

    inputs: int
    outputs: int
    taps: tuple[int, ...]  # in time, height and width; 1 in time for a convolution of frames
    strides: tuple[int, ...]  # in time, height and width
    video: bool  # They see several frames; otherwise a picture.


_CUBE, _ONE = (3, 3, 3), (1, 1, 1)

# The kernel by kind: tile 0 of triton is the first of `convolution_tiles.tiles_of`, tile 1 of
# hopper the second variant of `cuda_ops/hopper.py`. All others run the library.
#
# sm_90, H200, 795 GFLOP in bf16: 96 channels at 4 x 480 x 832 take cuDNN 2.69 to 2.95 ms and the
# best of the tiles 1.72 ms. Which one that was is not recorded, so the first stands here until the
# table of `bench_gpu.py` separates them. cuDNN takes 1.22 ms at 192 channels and 1.19 ms at 384,
# the tiles 1.35 and 1.36 ms.
KERNELS: Mapping[Chip, Mapping[Kind, Kernel]] = {
    (9, 0): {Kind(96, 96, _CUBE, _ONE, video=True): Kernel("triton", 0)}
}

# Chips whose tensor cores sum in float16 at twice the rate of float32 (NVIDIA, "Ada GPU
# architecture", table 2; "GeForce RTX 30 and 50 series"): a decode in bfloat16 computes in float16
# once a proof has shown that it is faster.
SUMS_IN_HALF: frozenset[Chip] = frozenset({(8, 6), (8, 9), (12, 0), (12, 1)})
