"""A network in numbers: what its layers make of frames, for who plans without running it.

Everything is read off the layers' own attributes and the shapes of their weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..layers.causal_conv import CausalConv3d
from ..layers.causal_layer import CausalLayer
from ..layers.conv import Conv, PointwiseConv, keeps_form
from ..models.base import Network
from ..models.receptive_field import Size, Span, is_encoder, reach


class Shape(NamedTuple):
    """Of an activation, but for the batch."""

    channels: int
    frames: int
    height: int
    width: int

    @property
    def numel(self) -> int:
        """Numbers of one of the batch."""
        return self.channels * self.frames * self.height * self.width

    def of(self, channels: int) -> "Shape":
        """With so many channels."""
        return Shape(channels, *self[1:])

    def lasting(self, frames: int) -> "Shape":
        """With so many frames."""
        return Shape(self.channels, frames, self.height, self.width)

    def sized(self, height: int, width: int) -> "Shape":
        """With frames of this size."""
        return Shape(self.channels, self.frames, height, width)


@dataclass(frozen=True)
class ConvSpec:
    """One convolution; what is not explained is as in `Conv`.

    Attributes:
        windowed: It copies its input to the frames before it.
        numbers: Those of its weight.
        rearranged: Those of a weight that every call brings to another order; see `conv.py`.
        rearranged_first: Likewise where the frame is a first one.
    """

    inputs: int
    outputs: int
    context: int
    stride: int
    times: int
    windowed: bool
    numbers: int
    rearranged: int
    rearranged_first: int


@dataclass(frozen=True)
class PartSpec:
    """A layer that is not made of others.

    Attributes:
        products: Its convolutions that see more than a pixel, in the order of their calls.
        mixed: Channels that its 1x1x1 convolutions make, of each.
        up: Height and width are so many times as large.
        down: They are divided by so much.
        outputs: Channels out; 0: as many as come in.
        times: Frames out for one in, but for the first.
        stride: Frames in for one out, likewise.
        banded: It may divide its work into bands of rows.
        reach: Pixels that it sees to each side.
    """

    products: tuple[ConvSpec, ...]
    mixed: tuple[int, ...]
    outputs: int
    up: int
    down: int
    times: int
    stride: int
    banded: bool
    reach: int

    def after(self, shape: Shape, *, single_frame: bool) -> Shape:
        """What comes out."""
        channels, frames, height, width = shape
        return Shape(
            self.outputs or channels,
            frames if single_frame else frames * self.times // self.stride,
            height * self.up // self.down,
            width * self.up // self.down,
        )

    def work(self, shape: Shape, *, single_frame: bool) -> int:
        """Products of numbers, about, if that comes in."""
        after = self.after(shape, single_frame=single_frame)
        area = max(shape.height * shape.width, after.height * after.width)
        return shape.frames * area * sum(product.numbers for product in self.products)

    def remembered(self, shape: Shape) -> int:
        """Numbers that its convolutions remember, if such frames come in."""
        area, total = shape.height * shape.width, 0
        for product in self.products:
            total += product.context * product.inputs * area
            area //= self.down**2 if product is self.products[0] else 1
        return total


@dataclass(frozen=True)
class LayerSpec:
    """A layer of a network.

    Attributes:
        parts: What it is made of.
        scale: Height and width are multiplied by the first and divided by the second number.
        growth: An activation in it is so many times as large as its input.
        pairs: It takes frames two at a time.
        holds: What it keeps beside its parts' activations: "input", "result" or nothing.
    """

    parts: tuple[PartSpec, ...]
    scale: tuple[int, int]
    growth: int
    pairs: bool
    holds: str

    def shapes(self, shape: Shape, *, single_frame: bool) -> list[Shape]:
        """What enters each part, and leaves the last."""
        shapes = [shape]
        for part in self.parts:
            shapes.append(part.after(shapes[-1], single_frame=single_frame))
        return shapes

    def after(self, shape: Shape, *, single_frame: bool) -> Shape:
        """What comes out."""
        return self.shapes(shape, single_frame=single_frame)[-1]

    def work(self, shape: Shape, *, single_frame: bool) -> int:
        """Products of numbers, about, if that comes in."""
        pairs = zip(self.parts, self.shapes(shape, single_frame=single_frame), strict=False)
        return sum(part.work(each, single_frame=single_frame) for part, each in pairs)

    def remembered(self, shape: Shape) -> int:
        """Numbers that its convolutions remember, if such frames come in."""
        pairs = zip(self.parts, self.shapes(shape, single_frame=True), strict=False)
        return sum(part.remembered(each) for part, each in pairs)


@dataclass(frozen=True)
class NetworkSpec:
    """A network: its layers, whether it encodes, and the frames that enter it for a latent."""

    layers: tuple[LayerSpec, ...]
    encodes: bool
    frames: int

    def shapes(self, size: Size, *, single_frame: bool) -> list[Shape]:
        """What enters each layer, the first at a height and width, and leaves the last.

        It is for one latent; `single_frame`: of a video that is a single frame.
        """
        shapes = [Shape(self.layers[0].parts[0].products[0].inputs, 1, *size)]
        if not single_frame:
            shapes = [shapes[0].lasting(self.frames)]
        for layer in self.layers:
            shapes.append(layer.after(shapes[-1], single_frame=single_frame))
        return shapes


def network_spec(network: Network) -> NetworkSpec:
    """Read the numbers off a network."""
    layers = tuple(map(layer_spec, network.layers()))
    frames = math.prod(part.stride for layer in layers for part in layer.parts)
    return NetworkSpec(layers, is_encoder(network), frames)


def lengths_before(layers: Sequence[LayerSpec], length: int, span: Span) -> list[int]:
    """Lengths that a tile has on its way, as `tiling.make_tile` cuts it; see `spans_before`."""
    spans = spans_before(layers, length, span)
    given = [spans[0][1] - spans[0][0]]
    for layer, (start, stop) in zip(layers, spans[1:], strict=True):
        given.append(given[-1] if layer.scale == (1, 1) else stop - start)
    given[-1] = span[1] - span[0]
    return given


def spans_before(layers: Sequence[LayerSpec], length: int, span: Span) -> list[Span]:
    """What a tile needs of whole frames along one axis, before each layer and after the last.

    Args:
        layers: The layers that run in tiles.
        length: Of the whole frames that enter them.
        span: What the tile gives of the frames that leave them.
    """
    lengths = [length]
    for layer in layers:
        for part in layer.parts:
            lengths.append(lengths[-1] * part.up // part.down)
    spans, block, at = [span], 1, len(lengths) - 1
    for layer in reversed(layers):
        up, down = layer.scale
        # Pixels that become one stay together, from the first layer on.
        block = max(block, down // up)
        start, stop = spans[-1]
        for part in reversed(layer.parts):
            at -= 1
            # What makes frames larger reaches as far among the larger ones.
            large, small = (part.reach, 0) if part.up > 1 else (0, part.reach)
            start = (start - large) * part.down // part.up - small
            stop = -((stop + large) * part.down // -part.up) + small
            start, stop = start // block * block, -(-stop // block) * block
            start, stop = max(0, start), min(lengths[at], stop)
        spans.append((start, stop))
    return spans[::-1]


def layer_spec(layer: CausalLayer) -> LayerSpec:
    """Read the numbers off a layer."""
    parts = tuple(_part_spec(part) for part in layer.blocks)
    scale = layer.scale.as_integer_ratio()
    return LayerSpec(parts, scale, layer.growth, layer.pairs, layer.holds)


def _part_spec(layer: CausalLayer) -> PartSpec:
    modules = list(layer.modules())
    convs = [module for module in modules if isinstance(module, Conv)]
    if layer.scale > 1:
        # Time is doubled on the small side.
        convs.sort(key=lambda conv: conv.weight.shape[-1])
    return PartSpec(
        tuple(map(_product, convs)),
        tuple(m.weight.shape[0] for m in modules if isinstance(m, PointwiseConv)),
        convs[-1].weight.shape[0] if convs else 0,
        *layer.scale.as_integer_ratio(),
        layer.times,
        math.prod(conv.stride for conv in convs),
        layer.sees_all,
        reach(layer),
    )


def _product(conv: Conv) -> ConvSpec:
    context = conv.context
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
    )
