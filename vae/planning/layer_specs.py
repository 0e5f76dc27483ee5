"""The layers of a network as numbers: output shapes, tails and work, without running it.

Everything is read from the attributes of the layers and the shapes of their weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ..layers.causal_conv import CausalConv3d
from ..layers.causal_layer import CausalLayer
from ..layers.conv import Conv, PointwiseConv, keeps_form
from ..models.base import Network
from ..models.receptive_field import Size, Span, is_encoder, reach

_NO_CODES: Mapping[str, int] = MappingProxyType({})


class Shape(NamedTuple):
    """Shape of an activation, without the batch."""

    channels: int
    frames: int
    height: int
    width: int

    @property
    def numel(self) -> int:
        """Elements per video of the batch."""
        return self.channels * self.frames * self.height * self.width

    def of(self, channels: int) -> "Shape":
        """Return the shape with another number of `channels`."""
        return Shape(channels, *self[1:])

    def lasting(self, frames: int) -> "Shape":
        """Return the shape with another number of `frames`."""
        return Shape(self.channels, frames, self.height, self.width)

    def sized(self, height: int, width: int) -> "Shape":
        """Return the shape with frames of `height` and `width`."""
        return Shape(self.channels, self.frames, height, width)


@dataclass(frozen=True)
class ConvSpec:
    """One convolution; `context`, `stride` and `times` as in `Conv`."""

    inputs: int  # channels
    outputs: int  # channels
    context: int
    stride: int
    times: int
    windowed: bool  # the input is copied behind the earlier frames
    numbers: int  # elements of its weight
    rearranged: int  # elements of a weight that every call reorders; see `conv.py`
    rearranged_first: int  # the same for a first frame
    packs: int = 1  # values in the bytes of an activation: more than one for codes


@dataclass(frozen=True)
class PartSpec:
    """A layer without layers inside; `times` and `stride` are those of all frames but the first."""

    products: tuple[ConvSpec, ...]  # convolutions except 1x1x1 ones, in the order of calls
    mixed: tuple[int, ...]  # output channels of each 1x1x1 convolution
    outputs: int  # channels; 0: as many as the input
    up: int  # factor of height and width
    down: int  # divisor of height and width
    times: int  # output frames per input frame
    stride: int  # input frames per output frame
    banded: bool  # it can divide its work into bands of rows
    reach: int  # pixels that it sees on each side

    def after(self, shape: Shape, *, single_frame: bool) -> Shape:
        """Return the output shape for `shape`; `single_frame`: of a video of one frame."""
        channels, frames, height, width = shape
        return Shape(
            self.outputs or channels,
            frames if single_frame else frames * self.times // self.stride,
            height * self.up // self.down,
            width * self.up // self.down,
        )

    def work(self, shape: Shape, *, single_frame: bool) -> int:
        """Return the approximate products for `shape`; `single_frame`: of a video of one frame."""
        after = self.after(shape, single_frame=single_frame)
        area = max(shape.height * shape.width, after.height * after.width)
        return shape.frames * area * sum(product.numbers for product in self.products)

    def remembered(self, shape: Shape) -> int:
        """Return the elements of the tails for an input of `shape`."""
        area, total = shape.height * shape.width, 0
        for product in self.products:
            total += product.context * product.inputs * area // product.packs
            area //= self.down**2 if product is self.products[0] else 1
        return total


@dataclass(frozen=True)
class LayerSpec:
    """A layer of a network."""

    parts: tuple[PartSpec, ...]
    scale: tuple[int, int]  # factor and divisor of height and width
    growth: int  # largest inner activation over the input
    pairs: bool  # it takes two frames at a time
    holds: str  # while its parts run: "input", "result" or "" for nothing

    def shapes(self, shape: Shape, *, single_frame: bool) -> list[Shape]:
        """Return the shapes before each part and after the last, for `shape` and `single_frame`."""
        shapes = [shape]
        for part in self.parts:
            shapes.append(part.after(shapes[-1], single_frame=single_frame))
        return shapes

    def after(self, shape: Shape, *, single_frame: bool) -> Shape:
        """Return the output shape for `shape`; `single_frame`: of a video of one frame."""
        return self.shapes(shape, single_frame=single_frame)[-1]

    def work(self, shape: Shape, *, single_frame: bool) -> int:
        """Return the approximate products for `shape`; `single_frame`: of a video of one frame."""
        pairs = zip(self.parts, self.shapes(shape, single_frame=single_frame), strict=False)
        return sum(part.work(each, single_frame=single_frame) for part, each in pairs)

    def remembered(self, shape: Shape) -> int:
        """Return the elements of the tails for an input of `shape`."""
        pairs = zip(self.parts, self.shapes(shape, single_frame=True), strict=False)
        return sum(part.remembered(each) for part, each in pairs)


@dataclass(frozen=True)
class NetworkSpec:
    """A network: its layers, whether it encodes, and its input frames per latent."""

    layers: tuple[LayerSpec, ...]
    encodes: bool
    frames: int

    def shapes(self, size: Size, *, single_frame: bool) -> list[Shape]:
        """Return the shapes of one latent before each layer and after the last."""
        shapes = [Shape(self.layers[0].parts[0].products[0].inputs, 1, *size)]
        if not single_frame:
            shapes = [shapes[0].lasting(self.frames)]
        for layer in self.layers:
            shapes.append(layer.after(shapes[-1], single_frame=single_frame))
        return shapes


def network_spec(
    network: Network, coded: frozenset[str] = frozenset(), itemsize: int = 1
) -> NetworkSpec:
    """Return the numbers of a network whose `coded` convolutions read codes of a byte."""
    packs = dict.fromkeys(coded, itemsize)
    layers = tuple(layer_spec(layer, packs) for layer in network.layers())
    frames = math.prod(part.stride for layer in layers for part in layer.parts)
    return NetworkSpec(layers, is_encoder(network), frames)


def lengths_before(layers: Sequence[LayerSpec], length: int, span: Span) -> list[int]:
    """Return the lengths of a tile before each layer and after the last, as `make_tile` cuts it."""
    spans = spans_before(layers, length, span)
    given = [spans[0][1] - spans[0][0]]
    for layer, (start, stop) in zip(layers, spans[1:], strict=True):
        given.append(given[-1] if layer.scale == (1, 1) else stop - start)
    given[-1] = span[1] - span[0]
    return given


def spans_before(layers: Sequence[LayerSpec], length: int, span: Span) -> list[Span]:
    """Return the part of whole frames that a tile needs before each layer and after the last."""
    lengths = [length]
    for layer in layers:
        for part in layer.parts:
            lengths.append(lengths[-1] * part.up // part.down)
    spans, block, at = [span], 1, len(lengths) - 1
    for layer in reversed(layers):
        up, down = layer.scale
        # Pixels that are merged into one stay together, from the first layer on.
        block = max(block, down // up)
        start, stop = spans[-1]
        for part in reversed(layer.parts):
            at -= 1
            # A layer that enlarges frames has its reach in pixels of the larger frames.
            large, small = (part.reach, 0) if part.up > 1 else (0, part.reach)
            start = (start - large) * part.down // part.up - small
            stop = -((stop + large) * part.down // -part.up) + small
            start, stop = start // block * block, -(-stop // block) * block
            start, stop = max(0, start), min(lengths[at], stop)
        spans.append((start, stop))
    return spans[::-1]


def layer_spec(layer: CausalLayer, packs: Mapping[str, int] = _NO_CODES) -> LayerSpec:
    """Return the numbers of `layer`; `packs` has those of the convolutions with codes by name."""
    parts = tuple(_part_spec(part, packs) for part in layer.blocks)
    scale = layer.scale.as_integer_ratio()
    return LayerSpec(parts, scale, layer.growth, layer.pairs, layer.holds)


def _part_spec(layer: CausalLayer, packs: Mapping[str, int]) -> PartSpec:
    modules = list(layer.modules())
    convs = [module for module in modules if isinstance(module, Conv)]
    if layer.scale > 1:
        # Time is doubled before space.
        convs.sort(key=lambda conv: conv.weight.shape[-1])
    return PartSpec(
        tuple(_product(conv, packs) for conv in convs),
        tuple(m.weight.shape[0] for m in modules if isinstance(m, PointwiseConv)),
        convs[-1].weight.shape[0] if convs else 0,
        *layer.scale.as_integer_ratio(),
        layer.times,
        math.prod(conv.stride for conv in convs),
        layer.sees_all,
        reach(layer),
    )


def _product(conv: Conv, packs: Mapping[str, int]) -> ConvSpec:
    context = conv.context
    packed = packs.get(getattr(conv, "code_name", ""), 1)
    numbers = conv.weight.numel()
    first = conv.first_form
    first_numbers = numbers // (conv.weight.shape[2] if first == "frame" else 1)
    return ConvSpec(
        conv.weight.shape[1],
        conv.weight.shape[0],
        context,
        conv.stride,
        conv.times,
        isinstance(conv, CausalConv3d) or context > 0,
        numbers,
        0 if keeps_form("volume", numbers) else numbers,
        0 if keeps_form(first, numbers) else first_numbers,
        packed,
    )
