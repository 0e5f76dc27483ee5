"""Sizes, offsets and descriptors of `csrc/cuda/hopper_conv.cu`, from one function.

A tile of 16 x 16 pixels by `width` output channels is a sum over boxes in shared memory: of pixels,
with the halo of the taps in a frame, and of weights. A row of a box has the channels of a slab, 64
or 128 bytes, whose parts of 16 bytes are permuted by bits 7 to 9 of their address ("CUDA driver
API", `CU_TENSOR_MAP_SWIZZLE_128B`; "PTX ISA", "Matrix descriptor" of `wgmma`): eight rows are an
atom, and a descriptor gives the start of the first one and the distance to the next.

A tap is another start. Whether one inside an atom is permuted by its address alone is not stated,
so there are two ways: one box of 18 x 18 pixels for nine taps, and with `copies` three of 18 x 16,
one per column of taps, whose starts are whole atoms. The part `hopper` of `bench_gpu.py` measures
which is right.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

from ..convolution.fused import WIDEST
from ..errors import Refusal
from ..shapes import blocks

# Rows and columns of a tile, and of a block of 64 pixels, the rows of a matrix product.
TILE, _SIDE = 16, 8

# Channels of a tile: the sums of two blocks fill at most 192 registers of a thread. The widest that
# divides the channels comes first; one of all channels can apply a norm.
_WIDTHS = (192, 160, 128, 96)

# Largest kernel in each dimension.
_MOST_TAPS = 3

# Threads: a warpgroup that loads, two that multiply.
THREADS = 3 * 128

# Memory of a block on sm_90, all that a program can have ("CUDA C++ programming guide", table of
# compute capabilities), and of the weights of a stage.
MOST_SHARED = 227 << 10
_STAGE = 32 << 10

# Boxes of pixels at a time, by the taps that read each: fewer where one lasts longer. Two is the
# least, because one is given back after the next has been read.
_PIXEL_STAGES = ((1, 4), (4, 3), (9, 2))
_WEIGHT_STAGES, _FEWEST = 8, 2

# Memory of the eight warps that multiply, in which they exchange 16 pixels by 32 channels.
_EXCHANGE = 8 << 10

_BYTES = 2  # of a number
_UNIT = 16  # bytes that addresses in descriptors count
_DEPTH = 16  # channels of a product
_ATOM = 8  # rows that a descriptor counts at once
_ALIGNED = 1024  # bytes of eight rows of 128
_BARRIER = 8  # bytes; a stage has two


class HopperTile(NamedTuple):
    """A compiled kernel, and the boxes that it loads."""

    width: int  # output channels of a tile
    box: tuple[int, int, int]  # rows, columns and channels of a box of pixels
    swizzle: int  # `CUtensorMapSwizzle`
    constants: Mapping[str, object]  # the macros of the source


@functools.lru_cache(maxsize=256)
def tile_of(
    kernel: tuple[int, int, int], inputs: int, outputs: int, *, copies: bool, norm: bool
) -> HopperTile:
    """Return the tile for some taps in time, height and width, and channels, or refuse them."""
    times, high, wide = kernel
    width = next((each for each in _WIDTHS if outputs % each == 0), 0)
    if inputs % 32 or not width:
        raise Refusal(
            f"it takes multiples of 32 channels to multiples of {', '.join(map(str, _WIDTHS))}, "
            f"not {inputs} to {outputs}"
        )
    if max(kernel) > _MOST_TAPS:
        raise Refusal(f"the kernel is {times} x {high} x {wide}; expected 3 taps at most")
    if norm and outputs > WIDEST:
        raise Refusal(f"a norm needs all channels in a tile: {WIDEST} at most, not {outputs}")
    slab = 64 if inputs % 64 == 0 else 32
    swizzle, pitch = (3 if slab == 64 else 2), slab * _BYTES
    # A box serves a column of taps, or all taps of a frame.
    rows, columns = TILE + high - 1, TILE + (0 if copies else wide - 1)
    shifts, taps = (wide, high) if copies else (1, high * wide)
    starts = [(tap, 0) if copies else divmod(tap, wide) for tap in range(taps)]
    box_bytes, tap_bytes = rows * columns * pitch, width * pitch
    groups = (taps, 1 if copies else wide, 1)
    group = next((each for each in groups if each * tap_bytes <= _STAGE), 1)
    pixel_stages = next(stages for most, stages in _PIXEL_STAGES if taps <= most)
    pixel_bytes, weight_bytes = blocks(box_bytes, _ALIGNED) * _ALIGNED, group * tap_bytes
    vectors = (1 + norm) * outputs * 4  # float32
    left = MOST_SHARED - _EXCHANGE - vectors - pixel_stages * (pixel_bytes + 2 * _BARRIER)
    weight_stages = min(_WEIGHT_STAGES, left // (weight_bytes + 2 * _BARRIER))
    if weight_stages < _FEWEST:
        raise Refusal(f"{outputs} channels leave no memory for stages")
    exchange = pixel_stages * pixel_bytes + weight_stages * weight_bytes
    barriers = exchange + _EXCHANGE
    after = barriers + 2 * _BARRIER * (pixel_stages + weight_stages)
    constants = {
        "PACK": 8, "THREADS": THREADS, "BLOCKS": 1, "NORM": int(norm),
        "WIDTH": width, "SLAB": slab, "FRAMES": times, "FRAME_TAPS": high * wide,
        "SHIFTS": shifts, "BOX_TAPS": taps, "TAP_STEP": wide if copies else 1, "GROUP": group,
        "OFFSETS": ",".join(str((y * columns + x) * pitch // _UNIT) for y, x in starts),
        "X_DESCRIPTOR": _descriptor(columns * pitch, swizzle), "X_STAGES": pixel_stages,
        "X_BYTES": pixel_bytes, "X_EXPECTED": box_bytes,
        "X_BLOCK": _SIDE * columns * pitch // _UNIT, "X_SIDE": _SIDE * pitch // _UNIT,
        "W_DESCRIPTOR": _descriptor(_ATOM * pitch, swizzle), "W_STAGES": weight_stages,
        "W_BYTES": weight_bytes, "W_EXPECTED": weight_bytes, "W_TAP": tap_bytes,
        "K_STEP": _DEPTH * _BYTES // _UNIT, "EXCHANGE": exchange, "BARRIERS": barriers,
        "VECTORS": after, "SHARED": after + vectors,
    }  # fmt: skip
    return HopperTile(width, (rows, columns, slab), swizzle, constants)


def _descriptor(distance: int, swizzle: int) -> str:
    """Return the descriptor of a matrix at address 0, whose atoms have a `distance` in bytes."""
    # Bits 16 to 29: a distance that permuted matrices do not use, 1; bits 32 to 45: the distance of
    # atoms; bits 49 to 51: 0, as the permutation begins at multiples of 1,024 bytes; bits 62 and
    # 63: 1 for rows of 128 bytes, 2 for 64.
    return f"{1 << 16 | distance // _UNIT << 32 | (4 - swizzle) << 62:#x}ull"
