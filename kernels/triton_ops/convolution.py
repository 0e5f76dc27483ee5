"""Convolutions in Triton: refusals and launches."""

import importlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import shapes
from ..constraints import UNDESCRIBED, described_strides, refuse_convolved
from ..convolution.fused import refuse_wide_norm
from ..convolution.weight import ConvWeight
from ..errors import Refusal
from .convolution_kernels import convolve
from .convolution_patches import convolve_patches
from .convolution_tiles import ConvTile, grid_of, tiles_for, videos_of
from .runtime import launch
from .tiles import blocks, chip_of, dense, given, refuse_span, strides, unit_of

# Values of a 16-byte load.
_LOAD = 8

# Taps of a frame that the bits of a 32-bit number count.
_MOST_TAPS = 31


class _Terms(NamedTuple):
    """What the kernel adds to the products, and the norm; None where it does not."""

    bias: Tensor | None
    residual: Tensor | None
    residual_bias: Tensor | None
    gamma: Tensor | None


def conv3d(
    x: Tensor,
    weight: ConvWeight,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...] = (1, 1, 1),
    padding: tuple[int, int] = (0, 0),
    tail: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    gamma: Tensor | None = None,
    out: Tensor | None = None,
    variant: int | None = None,
) -> Tensor:
    """Convolve a video, or frames as one, with tile `variant`; None: the first that fits."""
    tail = tail if tail is not None and tail.shape[2] else None
    tiles, taps = _tiles(x, weight, stride, gamma, variant), weight.plain()
    video = shapes.as_video(x)
    tile = _first_fit(tiles, video, tail, taps)
    if out is None:
        out = shapes.new_video(x, shapes.convolved(x, weight.shape, stride, padding, tail))
    terms = _Terms(
        bias, None if residual is None else shapes.as_video(residual), residual_bias, gamma
    )
    steps = stride if x.ndim == 5 else (1, *stride)
    _run(tile, video, tail, taps, steps, padding, terms, shapes.as_video(out))
    return out


def _tiles(
    x: Tensor,
    weight: ConvWeight,
    stride: tuple[int, ...],
    gamma: Tensor | None,
    variant: int | None,
) -> tuple[ConvTile, ...]:
    """Return the tiles that a call may have, or refuse its dtype, chip or norm."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise Refusal(f"its convolutions are for 16 bits, x is {x.dtype}".replace("torch.", ""))
    outputs = weight.shape[0]
    refuse_wide_norm(outputs, norm=gamma is not None)
    tiles = tiles_for(x, weight, stride)
    if not tiles:
        chip = chip_of(x.device)
        raise Refusal(f"its convolutions have no tiles for the chip {chip}")
    if variant is None:
        return tiles
    if not 0 <= variant < len(tiles):
        raise Refusal(f"there is no tile {variant}; this convolution has {len(tiles)}")
    return tiles[variant : variant + 1]


def _first_fit(
    tiles: tuple[ConvTile, ...], x: Tensor, tail: Tensor | None, taps: Tensor
) -> ConvTile:
    """Return the first tile that can load `x` and `tail` `[B, C, T, H, W]`, or refuse."""
    videos = [x] if tail is None else [x, tail]
    for tile in tiles:
        if not tile.columns or (
            all(described_strides(each) for each in videos) and taps.data_ptr() % 16 == 0
        ):
            return tile
    raise Refusal(UNDESCRIBED)


def _run(
    tile: ConvTile,
    x: Tensor,
    tail: Tensor | None,
    taps: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, int],
    terms: _Terms,
    out: Tensor,
) -> None:
    """Refuse what the kernels cannot read, and launch the one of the tile."""
    residual = terms.residual
    refuse_convolved(x, out, tail=tail, residual=residual)
    kernel = (1, *taps.shape[2:])[-3:]
    bias, residual_bias, gamma = (
        out if each is None else dense(each)
        for each in (terms.bias, terms.residual_bias, terms.gamma)
    )
    added = out if residual is None else residual
    out_unit, known = unit_of(_LOAD, out.shape[1], out, added), 0 if tail is None else tail.shape[2]
    given_terms = given(terms.bias, residual, terms.residual_bias)
    vectors = bias, added, residual_bias, gamma
    out_steps = [step // out_unit for each in (residual, out) for step in strides(each)]
    constants = tile.constants(x.shape[1], out.shape[1])
    constants |= {"OUT_UNIT": out_unit, "NORM": terms.gamma is not None, "HALF": tile.half}
    # With as many stages as iterations, the compiler unrolls the loop, and registers spill.
    stages = max(2, blocks(x.shape[1] * math.prod(kernel), tile.depth) - 1)
    constants |= {"ROOT": math.sqrt(out.shape[1]), "num_stages": min(tile.stages, stages)}
    constants |= dict(zip(("KT", "KH", "KW", "PH", "PW"), (*kernel, *padding), strict=True))
    if tile.columns:
        launch(
            convolve_patches,
            _patch_grid(tile, out),
            *(out, *_descriptors(tile, x, x if tail is None else tail, taps), *vectors),
            *(out.shape[2], known, *out.shape[3:], given_terms, *out_steps),
            **constants,
        )
        return
    if kernel[1] * kernel[2] > _MOST_TAPS:
        raise Refusal(f"the kernel has more than {_MOST_TAPS} taps in a frame")
    source = x if tail is None else tail
    in_unit = unit_of(_LOAD, x.shape[1], x, source)
    launch(
        convolve,
        grid_of(tile, x, out, kernel, stride),
        *(x, source, taps, *vectors, out),
        *(out.shape[2], known, *x.shape[3:], out.shape[4], math.prod(out.shape[3:]), given_terms),
        *(step // in_unit for each in (x, tail) for step in strides(each)),
        *out_steps,
        IN_UNIT=in_unit,
        **dict(zip(("ST", "SH", "SW"), stride, strict=True)),
        **constants,
    )


def _descriptors(tile: ConvTile, x: Tensor, tail: Tensor, taps: Tensor) -> list[Any]:
    """Return the descriptors of `x` and `tail` `[B, C, T, H, W]`, and of both blocks of `taps`."""
    # Triton before 3.4 lacks it, and has no such tiles.
    descriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    block = [1, 1, tile.pixels // tile.columns, tile.columns, tile.depth]
    made = []
    for video in (x, tail):
        batch, channels, *sizes = video.shape
        made.append(descriptor(video, [batch, *sizes, channels], described_strides(video), block))
    outputs, summed = taps.shape[0], taps[0].numel()
    for width in tile.outputs:
        block = [width or tile.outputs[0], tile.depth]
        made.append(descriptor(taps, [outputs, summed], [summed, 1], block))
    return made


def _patch_grid(tile: ConvTile, out: Tensor) -> tuple[int, int]:
    """Return the programs for `out` `[B, C_out, T, H, W]`, or refuse what 32 bits cannot count."""
    outputs, frames, height, width = out.shape[1:]
    rows = tile.pixels // tile.columns
    patches = blocks(height, rows) * blocks(width, tile.columns)
    programs = blocks(outputs, tile.width) * frames * patches
    refuse_span(programs, (rows * width + tile.columns) * outputs + tile.width)
    return programs, videos_of(out)
