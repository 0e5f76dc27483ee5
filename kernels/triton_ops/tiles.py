"""Chips, and the tile sizes and memory offsets of programs, without Triton.

A tile is some rows of pixels times all channels, in blocks of powers of two: 96 channels are 128
with a mask. A quarter of the lanes is idle then, which costs nothing while memory is the limit.
"""

import math

import torch
from torch import Tensor

from ..devices import amd_chip, device_kind
from ..errors import Refusal
from ..shapes import blocks as blocks
from ..shapes import strides as strides
from .runtime import GRID_LIMIT

# Compute capability, the architecture of an AMD GPU such as "gfx942", or the kind of another GPU.
Chip = tuple[int, int] | str

# Values per program of four warps, not measured: 32 float32 values of each thread stay in
# registers, and in 16 bits they are four loads of 16 bytes in flight. Kernels that hold several
# tiles use half of it.
ELEMENTS = 4096

# More channels would spill registers.
_CHANNEL_LIMIT = 8192

# Offsets within a tile have 32 bits.
OFFSET_LIMIT = 2**31


def chip_of(device: torch.device) -> Chip:
    """Return the chip of `device`; for the interpreter on a CPU, one that sums in float16 too."""
    kind = device_kind(device)
    if kind == "nvidia":
        return torch.cuda.get_device_capability(device)
    if kind == "amd":
        return amd_chip(device)
    return (8, 9) if kind == "cpu" else kind


def tile(channels: int, elements: int = ELEMENTS) -> tuple[int, int, int]:
    """Return rows and channels of a tile of about `elements`, powers of two, and its warps."""
    if channels > _CHANNEL_LIMIT:
        raise Refusal(f"more than {_CHANNEL_LIMIT} channels")
    block = power_of_two(channels)
    count = max(1, elements // block)
    return count, block, 8 if count * block > ELEMENTS else 4


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def unit_of(most: int, channels: int, *tensors: Tensor) -> int:
    """Return how many values an aligned load has, at most `most`: a power of two."""
    unit = math.gcd(most, channels)
    for x in tensors:
        unit = math.gcd(unit, *strides(x), x.data_ptr() // x.element_size())
    return unit


def given(*tensors: Tensor | None) -> int:
    """Return a number whose bit `n` is set if `tensors[n]` `[...]` is not None."""
    return sum(1 << bit for bit, x in enumerate(tensors) if x is not None)


def frame_grid(parts: int, x: Tensor, *others: Tensor) -> tuple[int, int, int]:
    """Return a grid of `parts` per frame of `x`, or refuse more frames or pixels than it counts."""
    for each in (x, *others):
        if max(each.shape[0], each.shape[2]) > GRID_LIMIT:
            raise Refusal(f"more than {GRID_LIMIT} frames or videos")
        if each.shape[3] * each.shape[4] >= OFFSET_LIMIT:
            raise Refusal("more pixels per frame than 31 bits count")
    return parts, x.shape[2], x.shape[0]


def refuse_span(*counts: int) -> None:
    """Refuse offsets within a tile that do not fit into 32 bits with a sign."""
    if max(counts) >= OFFSET_LIMIT:
        raise Refusal("the values of a tile are too far apart for 32-bit offsets")
