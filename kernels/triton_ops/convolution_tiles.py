"""Tiles of the convolution by GPU and output channels, without Triton.

A tile computes some adjacent pixels of a frame for all output channels, up to 192, so that it can
apply the norm. Block sizes are powers of two but channels are not, so a tile has up to two blocks
of channels: 96 is 64 and 32, 192 is 128 and 64.

The tiles fit into the shared memory of the chips, without spills. A video runs the one that
`tables.py` names, and on a chip without an entry the only one of its dtype once it is proved. On
H200, int8 tiles of 128 pixels and 4 warps, two programs per multiprocessor, took 0.76 of the time
of 256 pixels and 8 warps at 96 channels: tiles have this size where it does not spill.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..convolution.fused import WIDEST
from ..errors import Refusal
from ..tables import SUMS_IN_HALF
from .runtime import GRID_LIMIT
from .tiles import Chip, blocks, refuse_span

# Channels of the tiles.
_WIDTHS = (16, 32, 64, 96, 128, 160, WIDEST)


@dataclass(frozen=True)
class ConvTile:
    """What a program computes, and how."""

    pixels: int  # adjacent pixels of a frame
    depth: int  # products per iteration
    warps: int  # of a program
    stages: int  # iterations whose values are loaded or used at a time
    half: bool = False  # sum the products of an iteration in float16, and the iterations in float32
    cached: bool = False  # keep codes in the L1 cache for the other taps
    outputs: tuple[int, int] = (0, 0)  # in two blocks; the second is 0 if one is enough

    @property
    def width(self) -> int:
        """Output channels of a program."""
        return sum(self.outputs)

    def constants(self, inputs: int, outputs: int) -> dict[str, Any]:
        """Return the constants of the kernels for some channels, but the number of stages."""
        first, second = self.outputs
        return {
            "C_IN": inputs, "C_OUT": outputs, "N0": first, "N1": second, "K": self.depth,
            "M": self.pixels, "warps": self.warps,
        }  # fmt: skip


# Tiles by channels: the first one of the dtype, of the first key that is large enough.
_Tiles = Mapping[int, tuple[ConvTile, ...]]

# GeForce and workstation cards: twice the speed with sums in float16. Two blocks give each warp
# whole rows of a tile, so 128 pixels by 192 channels spill with them. A100 runs those without.
_AMPERE: _Tiles = {
    64: (ConvTile(256, 64, 8, 3, half=True), ConvTile(128, 32, 4, 4)),
    96: (ConvTile(256, 64, 8, 3, half=True), ConvTile(256, 32, 8, 4)),
    128: (ConvTile(128, 64, 8, 3, half=True), ConvTile(128, 32, 8, 4)),
    192: (ConvTile(64, 64, 4, 3, half=True), ConvTile(128, 32, 8, 4)),
}
_HOPPER: _Tiles = {
    64: (ConvTile(128, 64, 4, 4),),
    96: (
        ConvTile(128, 64, 4, 4),
        ConvTile(256, 64, 8, 4),
        # A quarter of the products is wasted, but an iteration has one product, not two.
        # 4 warps spill 72 bytes (Triton 3.9).
        ConvTile(128, 64, 8, 3, outputs=(128, 0)),
    ),
    192: (ConvTile(128, 64, 8, 4),),
}

# Chips whose tensor cores read shared memory, not registers: the larger block of channels comes
# first. Otherwise the smaller one does. The other order takes 5 to 40 registers more, by the cubins
# of Triton 3.9.
_DIRECT = frozenset(((9, 0), (10, 0), (10, 3)))

_TILES = {
    **dict.fromkeys(_DIRECT, _HOPPER),
    **dict.fromkeys((*SUMS_IN_HALF, (8, 0), (8, 7)), _AMPERE),
}

# The chip whose other tiles are timed by `bench_gpu.py`, for its table.
_TIMED = (9, 0)


@functools.cache
def tiles_of(chip: Chip, dtype: torch.dtype, outputs: int) -> tuple[ConvTile, ...]:
    """Return the tiles of a chip for some output channels, the one that serves first."""
    found = None if isinstance(chip, str) else _TILES.get(chip)
    if found is None or dtype not in (torch.float16, torch.bfloat16) or outputs > WIDEST:
        return ()
    width = width_of(outputs)
    split = split_of(width, large_first=chip in _DIRECT)
    halves = dtype == torch.float16 and chip in SUMS_IN_HALF
    tiles = next(tiles for most, tiles in found.items() if width <= most)
    made = [
        tile if tile.width else replace(tile, outputs=split)
        for tile in tiles
        if halves or not tile.half
    ]
    return tuple(made if chip == _TIMED else made[:1])


def grid_of(
    tile: ConvTile, x: Tensor, out: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[int, int]:
    """Return the programs of a video and the videos, or refuse what 32 bits cannot count."""
    videos, outputs, frames, height, width = out.shape
    inputs, columns = x.shape[1], x.shape[4]
    programs = blocks(outputs, tile.width) * frames * blocks(height * width, tile.pixels)
    rows = (tile.pixels // width + 2) * stride[1] + kernel[1]
    refuse_span(
        programs,
        height * width + tile.pixels,
        (rows * columns + stride[2] * width + kernel[2]) * inputs,
        (outputs + tile.width) * (math.prod(kernel) * inputs + tile.depth),
        (tile.pixels + 1) * outputs,
    )
    if videos > GRID_LIMIT:
        raise Refusal(f"more than {GRID_LIMIT} videos")
    return programs, videos


def width_of(outputs: int) -> int:
    """Return the channels of a tile for `outputs`."""
    return min(width for width in _WIDTHS if width >= outputs)


def split_of(width: int, *, large_first: bool) -> tuple[int, int]:
    """Return channels as two powers of two; the second is 0 for a power of two."""
    large = 1 << width.bit_length() - 1
    small = width - large
    return (large, small) if large_first or not small else (small, large)
