"""The convolution in Triton: refusals and the launch."""

import math
from typing import Any

import torch
from torch import Tensor

from ..convolution.fused import WIDEST, result_of
from ..convolution.weight import ConvWeight
from ..errors import Refusal
from .convolution_kernels import convolve
from .convolution_tiles import ConvTile, grid_of, tiles_of
from .runtime import launch
from .tiles import blocks, chip_of, given, strides, unit_of

# Values of a 16-byte load.
_LOAD = 8

# Taps of a frame that the bits of a 32-bit number count.
_MOST_TAPS = 31


def conv3d(x: Tensor, weight: ConvWeight, *terms: Any) -> Tensor:  # noqa: ANN401
    """Convolve a video, or each of its frames, with a tile of the chip by its `number`."""
    bias, residual, residual_bias, gamma, tail, out, stride, padding, number = terms
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise Refusal(f"its convolutions are for 16 bits, x is {x.dtype}".replace("torch.", ""))
    kernel = weight.kernel
    if kernel[1] * kernel[2] > _MOST_TAPS:
        raise Refusal(f"the kernel has more than {_MOST_TAPS} taps in a frame")
    tile, taps = tile_of(x, weight, number), weight.plain()
    out = result_of(x, weight, tail, out, stride, padding)
    source, added = x if tail is None else tail, out if residual is None else residual
    vectors = [out if each is None else each for each in (bias, residual_bias, gamma)]
    in_unit = unit_of(_LOAD, x.shape[1], x, source)
    out_unit = unit_of(_LOAD, out.shape[1], out, added)
    # With as many stages as iterations, the compiler unrolls the loop, and registers spill.
    stages = max(2, blocks(x.shape[1] * math.prod(kernel), tile.depth) - 1)
    launch(
        convolve,
        grid_of(tile, x, out, kernel, stride),
        *(x, source, taps, vectors[0], added, *vectors[1:], out),
        *(out.shape[2], 0 if tail is None else tail.shape[2], *x.shape[3:], out.shape[4]),
        *(math.prod(out.shape[3:]), given(bias, residual, residual_bias)),
        *(step // in_unit for each in (x, tail) for step in strides(each)),
        *(step // out_unit for each in (residual, out) for step in strides(each)),
        **dict(zip(("KT", "KH", "KW", "PH", "PW"), (*kernel, *padding), strict=True)),
        **dict(zip(("ST", "SH", "SW"), stride, strict=True)),
        **tile.constants(x.shape[1], out.shape[1]),
        IN_UNIT=in_unit, OUT_UNIT=out_unit, NORM=gamma is not None, HALF=tile.half,
        ROOT=math.sqrt(out.shape[1]), num_stages=min(tile.stages, stages),
    )  # fmt: skip
    return out


def tile_of(x: Tensor, weight: ConvWeight, number: int) -> ConvTile:
    """Return a tile for `x` `[B, C, T, H, W]` and `weight`, or refuse the chip or the channels."""
    chip, outputs = chip_of(x.device), weight.shape[0]
    if outputs > WIDEST:
        raise Refusal(f"its tiles have up to {WIDEST} output channels, not {outputs}")
    tiles = tiles_of(chip, x.dtype, outputs)
    if not tiles:
        raise Refusal(f"its convolutions have no tiles for the chip {chip}")
    if number >= len(tiles):
        raise Refusal(f"there is no tile {number}; this convolution has {len(tiles)}")
    return tiles[number]
