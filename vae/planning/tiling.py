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
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..layers.causal_layer import CausalLayer
from ..layers.temporal_cache import TemporalCache
from ..layers.workspace import canonical
from ..models.base import Network
from ..models.receptive_field import Size, Span, is_encoder
from .layer_specs import layer_spec, spans_before

Chains = list[list[CausalLayer]]


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
class FrameTile:
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
    layers: list[CausalLayer]
    spans: list[tuple[Span, Span]]


class Crop(CausalLayer):
    """A layer that copies a rectangle of the frames: what comes in may be for other tiles too."""

    def __init__(self, rows: Span, columns: Span) -> None:
        super().__init__()
        self.rows, self.columns = slice(*rows), slice(*columns)

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """`[B, C, T, H, W]` to `[B, C, T, rows, columns]`, channels-last."""
        part = x[..., self.rows, self.columns]
        copy = functools.partial(part.clone, memory_format=torch.channels_last_3d)
        return canonical(cache.attempt(copy))


def can_cut(network: Network) -> list[int]:
    """Where the layers of a network can be divided into whole frames and tiles.

    Numbers of layers before the cut, from the smallest tiled part to the largest; none where a
    layer of the tiled end sees whole frames.
    """
    layers = network.layers()
    seeing = [
        index for index, layer in enumerate(layers) if any(part.sees_all for part in layer.blocks)
    ]
    if is_encoder(network):
        cuts = range(1, seeing[0] + 1 if seeing else len(layers))
        return [cut for cut in cuts if layers[cut - 1].scale < 1]
    cuts = range(len(layers) - 1, (seeing[-1] if seeing else 0), -1)
    return [cut for cut in cuts if layers[cut].scale > 1]


def divided(chains: Sequence[Sequence[CausalLayer]], count: int) -> tuple[Chains, Chains]:
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


def make_tile(chains: Chains, size: Size, rows: Span, columns: Span) -> FrameTile:
    """Prepare one rectangle.

    Args:
        chains: The layers that run in tiles.
        size: Height and width of the whole frames that enter them.
        rows: What the tile gives of the frames that leave them.
        columns: Likewise.
    """
    layers = [layer for chain in chains for layer in chain]
    specs = [layer_spec(layer) for layer in layers]
    down, across = (spans_before(specs, *each) for each in zip(size, (rows, columns), strict=True))
    needed = list(zip(down, across, strict=True))
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
            # Where the size changes, what the layers behind do not need is cut off; at once,
            # because a layer that takes pairs of frames has to begin its chain.
            if layer.scale != 1 or len(seen) == len(layers):
                made[-1] += _crop(have, layer.scale, needed[len(seen)])
                have = needed[len(seen)]
    return FrameTile(rows, columns, made, layers, seen)


def _crop(before: tuple[Span, Span], scale: Fraction, want: tuple[Span, Span]) -> list[CausalLayer]:
    """What cuts a scaled rectangle, both counted in pixels of the whole frame, down to another."""
    have = tuple((int(start * scale), int(stop * scale)) for start, stop in before)
    if have == want:
        return []
    spans = [(new[0] - old[0], new[1] - old[0]) for old, new in zip(have, want, strict=True)]
    return [Crop(*spans)]


def _spans(length: int, most: int) -> list[Span]:
    count = max(1, -(-length // max(1, most)))
    edges = [length * index // count for index in range(count + 1)]
    return list(itertools.pairwise(edges))
