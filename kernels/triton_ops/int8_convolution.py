"""The int8 convolution in Triton: tiles, one for a shape class, refusals and the launch."""

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..codes import zero_of
from ..constraints import refuse_dtype
from ..convolution.weight import ConvWeight
from ..errors import Refusal
from ..shapes import new_sums
from .convolution_tiles import ConvTile, grid_of, split_of, width_of
from .int8_kernels import convolve_codes
from .runtime import launch
from .tiles import Chip, blocks, chip_of, given, strides, unit_of

# Values of a 16-byte load of codes, and of 16 bits.
_CODES, _VALUES = 16, 8

# Summed products from which blocks of 64 that cross taps waste little: 27 x 96 fill 40.5 of 41.
_MANY = 1024

# Products of two codes whose sum fits into 31 bits, before the zero is subtracted: 128 * 128 each.
_MOST = (1 << 17) - 1


# Programs of 128 pixels and 4 warps: two per SM hide each other's barriers, first loads and last
# stores. On H200 two blocks of 96 channels take 1.01 ms for 192 channels at 4 x 240 x 416, where
# one program of 8 warps with all 192 takes 1.20 ms. At 96 channels, 480 x 832, 128 pixels take
# 1.27 ms and 256 pixels with 8 warps 1.67 ms (Triton 3.6, 2026-11). 128 products per iteration:
# 384 channels at 4 x 120 x 208 take 0.81 ms, and 0.92 ms with 64. 160 channels take 0.67 ms with 8
# bytes of spills after the loop, and 0.94 ms with 8 warps and none.
_HOPPER = {
    96: ConvTile(128, 128, 4, 4),
    128: ConvTile(128, 128, 4, 3),
    160: ConvTile(128, 64, 4, 4),
}

# Other chips were not timed. Counted in SASS, loads are the limit: with `cached` the L1 cache has
# two of three pixels of a kernel row, and three buffers leave it the rest of the memory.
_WIDE = ConvTile(128, 64, 8, 3, cached=True)
_OTHERS = {32: replace(_WIDE, pixels=256), 96: replace(_WIDE, warps=4), 160: _WIDE}

# Tiles by their output channels: the one of the first key that is large enough. Not for (10, 3),
# which multiplies int8 slowly.
_CHIPS = (8, 0), (8, 6), (8, 7), (8, 9), (10, 0), (12, 0), (12, 1)
_TILES = {(9, 0): _HOPPER, **dict.fromkeys(_CHIPS, _OTHERS)}

# Channels of tiles for more than 96 channels; of those that waste the least, the first.
_WIDTHS = (96, 160, 128)


def int8_conv3d(x: Tensor, weight: ConvWeight, scale: Tensor | None, *terms: Any) -> Tensor:  # noqa: ANN401
    """Convolve codes in int8."""
    bias, residual, residual_bias, out, dtype = terms
    refuse_dtype(x, (torch.int8,))
    chip, summed = chip_of(x.device), math.prod(weight.shape[1:])
    tile = tile_of(chip, weight.shape[0], weight.shape[1], summed)
    out = new_sums(x, weight, dtype) if out is None else out
    if summed > _MOST:
        raise Refusal(f"the tensor cores saturate sums of more than {_MOST} products")
    kernel, taps = weight.shape[2:], weight.plain()
    sums = weight.laid_out("sums", lambda each: each.sum((1, 2, 3, 4), dtype=torch.int32))
    vectors = [out if each is None else each for each in (scale, bias, residual_bias)]
    added = out if residual is None else residual
    in_unit = unit_of(_CODES, x.shape[1], x)
    out_unit = unit_of(_VALUES, out.shape[1], out, added)
    launch(
        convolve_codes,
        grid_of(tile, x, out, kernel, (1, 1, 1)),
        *(x, taps, sums, *vectors[:2], added, vectors[2], out),
        *(out.shape[2], x.shape[4], out.shape[4], math.prod(out.shape[3:]), taps[0].numel()),
        given(bias, residual, residual_bias),
        *(step // in_unit for step in strides(x)),
        *(step // out_unit for each in (residual, out) for step in strides(each)),
        **dict(zip(("KT", "KH", "KW"), kernel, strict=True)),
        **tile.constants(x.shape[1], out.shape[1]), IN_UNIT=in_unit, OUT_UNIT=out_unit,
        ZERO=zero_of(x.dtype), CACHE=".ca" if tile.cached else "", num_stages=tile.stages,
    )  # fmt: skip
    return out


@functools.cache
def tile_of(chip: Chip, outputs: int, inputs: int, summed: int) -> ConvTile:
    """Return the tile for `outputs`, `inputs` and products of a sum, or refuse the chip."""
    tiles = None if isinstance(chip, str) else _TILES.get(chip)
    if tiles is None:
        raise Refusal(f"its int8 convolutions have no tiles for the chip {chip}")
    if outputs <= _WIDTHS[0]:
        width = max(32, width_of(outputs))
    else:
        width = min(_WIDTHS, key=lambda width: blocks(outputs, width) * width)
    tile = next(tile for most, tile in tiles.items() if width <= most)
    depth = min(tile.depth, inputs & -inputs)
    if depth < 64:
        depth = 64 if summed >= _MANY else 32
    # More stages than iterations would only take memory.
    stages = min(tile.stages, max(2, blocks(summed, depth) - 1))
    # Two blocks of channels, because a loop with one product keeps parts of it in registers, and
    # Triton 3.9 takes these apart into bytes: 181 `PRMT` instead of 8 for 32 products.
    small, large = split_of(width, large_first=False)
    halves = (small, large) if large else (width // 2, width // 2)
    return replace(tile, depth=depth, stages=stages, outputs=halves)


def has_tiles(device: torch.device) -> bool:
    """Return whether there are tiles for `device`: not for a chip that multiplies int8 slowly."""
    return chip_of(device) in _TILES
