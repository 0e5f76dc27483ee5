"""Exact tiles: layers that see only pixels nearby run on rectangles of the frame, with a halo.

What a layer gives at a pixel depends on the pixels around it that its convolutions reach. So a
tile is computed from a rectangle that is larger by the reach of all layers behind it, and what the
edges of that have spoiled is cut off: the tile has the very numbers of the whole frame, and there
is nothing to blend. The reach is read off the layers: from its last temporal upsampling on, a
decoder of Wan sees 20 pixels of what leaves it.

Layers that see the whole frame, such as attention, cannot be in tiles. In a decoder all that are
come first and in an encoder last, at the size of the latents, so that the rest can be.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from ..layers.conv import Conv
from ..layers.temporal_cache import TemporalCache
from ..models.base import Layer, Network, sublayers
from ..validation import canonical

Span = tuple[int, int]
Size = tuple[int, int]
Chains = list[list[Layer]]


@dataclass(frozen=True)
class Tiles:
    """How the frames of a stream are cut.

    Attributes:
        cut: Layers before the cut: in a decoder these run on whole frames and the others in tiles,
            in an encoder the other way round.
        size: Height and width of a tile, at most, in pixels of the tiled end: of what leaves the
            last layer of a decoder or enters the first of an encoder.
    """

    cut: int
    size: Size


@dataclass(frozen=True)
class Tile:
    """One rectangle.

    Attributes:
        rows: What it gives of the frames that leave the tiled layers.
        columns: Likewise.
        chains: The tiled layers with what cuts the halo off, from whole frames to the rectangle.
        layers: The layers alone, in order.
        spans: Rows and columns that each of them is given.
    """

    rows: Span
    columns: Span
    chains: Chains
    layers: list[Layer]
    spans: list[tuple[Span, Span]]


class Crop:
    """A layer that copies a rectangle of the frames: what comes in may be for other tiles too.

    Args:
        rows: The rows that stay.
        columns: The columns.
    """

    growth = 1

    def __init__(self, rows: Span, columns: Span) -> None:
        self.rows, self.columns = slice(*rows), slice(*columns)

    def __call__(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """`[B, C, T, H, W]` to `[B, C, T, rows, columns]`, channels-last."""
        part = x[..., self.rows, self.columns]
        copy = functools.partial(part.clone, memory_format=torch.channels_last_3d)
        return canonical(cache.attempt(copy))


def can_cut(network: Network) -> list[int]:
    """Where the layers of a network can be divided into whole frames and tiles.

    Args:
        network: An encoder or a decoder.

    Returns:
        Numbers of layers before the cut, from the smallest tiled part to the largest; none where a
        layer of the tiled end sees whole frames.
    """
    layers = network.layers()
    seeing = [index for index, layer in enumerate(layers) if _sees_all(layer)]
    if is_encoder(network):
        cuts = range(1, seeing[0] + 1 if seeing else len(layers))
        return [cut for cut in cuts if _scale(layers[cut - 1]) < 1]
    cuts = range(len(layers) - 1, (seeing[-1] if seeing else 0), -1)
    return [cut for cut in cuts if _scale(layers[cut]) > 1]


def is_encoder(network: Network) -> bool:
    """Whether frames become smaller on the way."""
    return any(_scale(layer) < 1 for layer in network.layers())


def divided(chains: Sequence[Sequence[Layer]], count: int) -> tuple[Chains, Chains]:
    """The first `count` layers, and the others."""
    first: Chains = []
    rest: Chains = []
    for chain in chains:
        here = max(0, min(len(chain), count))
        count -= len(chain)
        if here or not first:
            first.append(list(chain[:here]))
        if here < len(chain):
            rest.append(list(chain[here:]))
    return first, rest or [[]]


def grid(size: Size, tile: Size) -> list[tuple[Span, Span]]:
    """Rows and columns of the tiles, of about one size and none larger than `tile`."""
    rows, columns = (_spans(*pair) for pair in zip(size, tile, strict=True))
    return list(itertools.product(rows, columns))


def make_tile(chains: Chains, size: Size, rows: Span, columns: Span) -> Tile:
    """Prepare one rectangle.

    Args:
        chains: The layers that run in tiles.
        size: Height and width of the whole frames that enter them.
        rows: What the tile gives of the frames that leave them.
        columns: Likewise.

    Returns:
        The tile.
    """
    layers = [layer for chain in chains for layer in chain]
    sizes = frame_sizes(layers, size)
    spans = (_needed(layers, sizes, axis, span) for axis, span in enumerate((rows, columns)))
    needed = list(zip(*spans, strict=True))
    have = needed[0]
    made: Chains = []
    seen: list[tuple[Span, Span]] = []
    for chain in chains:
        made.append([])
        for layer in chain:
            if not seen:
                made[-1].append(Crop(*have))
            made[-1].append(layer)
            seen.append(have)
            scale = _scale(layer)
            have = (_scaled(have[0], scale), _scaled(have[1], scale))
            # Where the size changes, what the layers behind do not need is cut off; at once,
            # because a layer that takes pairs of frames has to begin its chain.
            if scale != 1 or len(seen) == len(layers):
                made[-1] += _crop(have, needed[len(seen)])
                have = needed[len(seen)]
    return Tile(rows, columns, made, layers, seen)


def frame_sizes(layers: Sequence[Layer], size: Size) -> list[Size]:
    """Height and width of whole frames before each layer, and after the last."""
    return list(itertools.accumulate(layers, _size_after, initial=size))


def reach(part: nn.Module) -> int:
    """Pixels that a layer without `blocks` sees on each side of one, where its convolutions are."""
    convs = (module for module in part.modules() if isinstance(module, Conv))
    return sum(conv.weight.shape[-1] // 2 for conv in convs)


def _sees_all(layer: nn.Module) -> bool:
    return any(getattr(module, "sees_all", False) for module in layer.modules())


def _scale(layer: Layer) -> Fraction:
    """Height and width out for those in."""
    return math.prod((_own_scale(part) for part in sublayers(layer)), start=Fraction(1))


def _own_scale(part: nn.Module) -> Fraction:
    return Fraction(getattr(part, "scale", 1))


def _size_after(size: Size, layer: Layer) -> Size:
    scale = _scale(layer)
    return int(size[0] * scale), int(size[1] * scale)


def _scaled(span: Span, scale: Fraction) -> Span:
    return int(span[0] * scale), int(span[1] * scale)


def _needed(layers: list[Layer], sizes: list[Size], axis: int, span: Span) -> list[Span]:
    """What is needed before each layer, and after the last, for a span of what leaves that."""
    spans = [span]
    block = 1
    for layer, size in zip(reversed(layers), reversed(sizes[:-1]), strict=True):
        # Pixels that become one stay together, from the first layer on.
        block = max(block, int(1 / min(1, _scale(layer))))
        span = _needed_before(layer, size[axis], span, block)
        spans.append(span)
    return spans[::-1]


def _needed_before(layer: Layer, length: int, span: Span, block: int) -> Span:
    parts = sublayers(layer)
    lengths = [length]
    for part in parts[:-1]:
        lengths.append(int(lengths[-1] * _own_scale(part)))
    for part, size in zip(reversed(parts), reversed(lengths), strict=True):
        scale, pixels = _own_scale(part), reach(part)
        # What makes frames larger reaches as far among the larger ones.
        large, small = (pixels, 0) if scale > 1 else (0, pixels)
        start = math.floor((span[0] - large) / scale) - small
        stop = math.ceil((span[1] + large) / scale) + small
        span = max(0, start // block * block), min(size, -(-stop // block) * block)
    return span


def _crop(have: tuple[Span, Span], want: tuple[Span, Span]) -> list[Layer]:
    """What cuts a rectangle, both counted in pixels of the whole frame, down to another."""
    if have == want:
        return []
    spans = [(new[0] - old[0], new[1] - old[0]) for old, new in zip(have, want, strict=True)]
    return [Crop(*spans)]


def _spans(length: int, most: int) -> list[Span]:
    count = max(1, -(-length // max(1, most)))
    edges = [length * index // count for index in range(count + 1)]
    return list(itertools.pairwise(edges))
