"""Tiles of the convolution by GPU and output channels, without Triton.

A tile computes some adjacent pixels of a frame, or a patch of it, for some output channels. Block
sizes are powers of two but channels are not, so a tile has up to two blocks of channels: 96 is 64
and 32, 192 is 128 and 64. A tile of up to 192 channels holds whole pixels and can apply the norm.

The tiles fit into the shared memory of the chips, without spills on NVIDIA. A video runs the one
that `tables.py` names, and on a chip without an entry the first of its dtype once it is proved. Of
a chip with a table the others are here to be measured for it. On H200, int8 tiles of 128 pixels and
4 warps, two programs per multiprocessor, took 0.76 of the time of 256 pixels and 8 warps at 96
channels: such tiles come first where they do not spill.
"""

import functools
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..convolution.fused import WIDEST
from ..convolution.weight import ConvWeight
from ..errors import Refusal
from .runtime import GRID_LIMIT
from .tiles import Chip, blocks, chip_of, refuse_span

# Channels of the tiles that hold whole pixels, and of those that hold parts, best first.
_WHOLE = (16, 32, 64, 96, 128, 160, 192)
_PARTIAL = (128, 192, 160, 96)

# Most tiles of a shape class, and those before the first with descriptors.
_MOST, _BEFORE = 6, 1


@dataclass(frozen=True)
class ConvTile:
    """What a program computes, and how."""

    pixels: int  # adjacent pixels of a frame
    depth: int  # products per iteration
    warps: int  # of a program
    stages: int  # iterations whose values are loaded or used at a time
    half: bool = False  # sum the products of an iteration in float16, and the iterations in float32
    cached: bool = False  # keep pixels in the L1 cache for the other taps
    columns: int = 0  # of a patch that descriptors load; 0: each pixel is loaded by its address
    outputs: tuple[int, int] = (0, 0)  # in two blocks; the second is 0 if one is enough

    @property
    def width(self) -> int:
        """Output channels of a program."""
        return sum(self.outputs)

    def constants(self, inputs: int, outputs: int) -> dict[str, Any]:
        """Return the constants of the kernels for some channels, but the number of stages."""
        first, second = self.outputs
        made = {"C_IN": inputs, "C_OUT": outputs, "N0": first, "N1": second, "K": self.depth}
        if self.columns:
            made |= {"ROWS": self.pixels // self.columns, "COLUMNS": self.columns}
        else:
            made |= {"M": self.pixels, "CACHE": ".ca" if self.cached else ""}
        return made | {"warps": self.warps}


class _Family(NamedTuple):
    """Tiles for some chips."""

    # by channels: those of the first key that is large enough
    tiles: dict[int, tuple[ConvTile, ...]]
    shared: int  # memory of a program, in KiB
    # The tensor cores read shared memory, not registers. A stage in use has a buffer of its own
    # then, and the larger block of channels comes first. Otherwise the smaller one does. The other
    # order takes 5 to 40 registers more, by the cubins of Triton 3.9.
    direct: bool = False
    # Tiles with descriptors by channels, which follow the first of the others. They have a stage
    # more where they add 32 products per iteration instead of 64.
    patches: Mapping[int, tuple[ConvTile, ...]] = MappingProxyType({})


# GeForce and workstation cards: twice the speed with sums in float16. Two blocks give each warp
# whole rows of a tile, so 128 pixels by 192 channels spill with them.
_GEFORCE = _Family(
    {
        64: (ConvTile(256, 64, 8, 3, half=True), ConvTile(128, 32, 4, 4)),
        96: (ConvTile(256, 64, 8, 3, half=True), ConvTile(256, 32, 8, 4)),
        128: (ConvTile(128, 64, 8, 3, half=True), ConvTile(128, 32, 8, 4)),
        192: (ConvTile(64, 64, 4, 3, half=True), ConvTile(128, 32, 8, 4)),
    },
    shared=99,
)
_AMPERE = _Family(
    {
        64: (ConvTile(128, 64, 4, 4),),
        96: (ConvTile(128, 64, 4, 3),),
        128: (ConvTile(128, 64, 8, 4),),
        192: (ConvTile(128, 64, 8, 3),),
    },
    shared=163,
)
_HOPPER = _Family(
    {
        64: (
            ConvTile(128, 64, 4, 4),
            ConvTile(256, 64, 8, 4),
            ConvTile(128, 64, 8, 4),
        ),
        96: (
            ConvTile(128, 64, 4, 4),
            ConvTile(256, 64, 8, 4),
            ConvTile(128, 64, 8, 4),
            ConvTile(256, 32, 8, 4),
        ),
        192: (
            ConvTile(128, 64, 8, 4),
            ConvTile(128, 64, 8, 3),
            ConvTile(64, 64, 4, 4),
            ConvTile(128, 32, 8, 4),
        ),
    },
    shared=227,
    direct=True,
    # Tensor cores of sm_90 read patches of one row from shared memory, and others from registers:
    # Triton 3.9 does not recognise a reshaped load. A short row wastes much of the first.
    patches={
        96: (ConvTile(128, 64, 4, 3, columns=128), ConvTile(256, 64, 8, 3, columns=16)),
        192: (ConvTile(128, 64, 8, 4, columns=128), ConvTile(128, 64, 8, 4, columns=16)),
    },
)
_GEFORCE_BLACKWELL = _GEFORCE._replace(
    patches={
        96: (ConvTile(128, 64, 4, 3, half=True, columns=16),),
        128: (ConvTile(128, 64, 8, 3, half=True, columns=16),),
        192: (ConvTile(64, 64, 4, 3, half=True, columns=16),),
    }
)
# AMD: 64 lanes per wave, and 32.
_CDNA = _Family({128: (ConvTile(128, 64, 8, 2),), 192: (ConvTile(128, 32, 8, 2),)}, shared=64)
_RDNA = _Family(
    {
        64: (ConvTile(128, 64, 8, 2),),
        96: (ConvTile(128, 32, 8, 2),),
        128: (ConvTile(128, 64, 8, 2),),
        192: (ConvTile(64, 32, 8, 2),),
    },
    shared=64,
)

_FAMILIES = {
    (8, 0): _AMPERE,
    (8, 7): _AMPERE,
    (8, 6): _GEFORCE,
    (8, 9): _GEFORCE,
    (9, 0): _HOPPER,
    (10, 0): _HOPPER,
    (10, 3): _HOPPER,
    (12, 0): _GEFORCE_BLACKWELL,
    (12, 1): _GEFORCE_BLACKWELL,
}


def tiles_for(x: Tensor, weight: ConvWeight, stride: tuple[int, ...]) -> tuple[ConvTile, ...]:
    """Return the tiles for `x` `[B, C, ...]`, `weight` and `stride`; none for an unknown chip."""
    described = all(step == 1 for step in stride) and _has_descriptors()
    inputs = x.shape[1] if described else 0
    return tiles_of(chip_of(x.device), x.dtype, weight.shape[0], inputs)


@functools.cache
def tiles_of(chip: Chip, dtype: torch.dtype, outputs: int, inputs: int = 0) -> tuple[ConvTile, ...]:
    """Return the tiles that fit a chip, fastest first; `inputs` of 0: descriptors load none."""
    family = _family(chip)
    if family is None or dtype not in (torch.float16, torch.bfloat16):
        return ()
    chosen: list[ConvTile] = []
    for width in widths_of(outputs):
        row = next(tiles for most, tiles in family.tiles.items() if width <= most)
        split = split_of(width, large_first=family.direct)
        chosen += [replace(tile, outputs=split) for tile in row]
    chosen[_BEFORE:_BEFORE] = _patches(family, dtype, outputs, inputs)
    fitting = [
        tile
        for tile in chosen
        if _shared_bytes(tile, family) <= family.shared << 10
        and (dtype == torch.float16 or not tile.half)
    ]
    # The sort is stable: tiles of the better width stay in front.
    return tuple(sorted(fitting, key=lambda tile: not tile.half)[:_MOST])


def grid_of(
    tile: ConvTile, x: Tensor, out: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[int, int]:
    """Return programs of a video and videos for tiles of adjacent pixels, or refuse 32 bits."""
    outputs, frames, height, width = out.shape[1:]
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
    return programs, videos_of(out)


def videos_of(out: Tensor) -> int:
    """Return the videos of `out`, programs along the second axis of a grid, or refuse too many."""
    if out.shape[0] > GRID_LIMIT:
        raise Refusal(f"more than {GRID_LIMIT} videos")
    return out.shape[0]


def _patches(family: _Family, dtype: torch.dtype, outputs: int, inputs: int) -> list[ConvTile]:
    """Return the tiles with descriptors, which load blocks of 32 or 64 channels."""
    depth = min(64, inputs & -inputs)
    if depth < 32 or not family.patches:
        return []
    width = widths_of(outputs)[0]
    row = next(tiles for most, tiles in family.patches.items() if width <= most)
    split = split_of(width, large_first=family.direct)
    return [
        replace(
            tile,
            depth=depth,
            stages=tile.stages + (depth == 32),
            half=tile.half and dtype == torch.float16,
            outputs=split,
        )
        for tile in row
    ]


@functools.cache
def _has_descriptors() -> bool:
    """Return whether Triton has descriptors that the host makes, as since version 3.4."""
    try:
        return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
    except ImportError:
        return False


def _family(chip: Chip) -> _Family | None:
    if isinstance(chip, str):
        return _CDNA if chip.startswith("gfx9") else _RDNA if chip.startswith("gfx1") else None
    return _FAMILIES.get(chip)


def widths_of(outputs: int) -> tuple[int, ...]:
    """Return the channels of tiles for `outputs`: whole pixels, or two that waste the least."""
    if outputs <= WIDEST:
        return (min(width for width in _WHOLE if width >= outputs),)
    padded = {width: blocks(outputs, width) * width for width in _PARTIAL}
    return tuple(width for width in _PARTIAL if padded[width] == min(padded.values()))[:2]


def split_of(width: int, *, large_first: bool) -> tuple[int, int]:
    """Return channels as two powers of two; the second is 0 for a power of two."""
    large = 1 << width.bit_length() - 1
    small = width - large
    return (large, small) if large_first or not small else (small, large)


def _shared_bytes(tile: ConvTile, family: _Family) -> int:
    """Return the shared memory of the values of all stages, in bytes."""
    buffers = tile.stages if family.direct else tile.stages - 1
    return buffers * (tile.pixels + tile.width) * tile.depth * 2
