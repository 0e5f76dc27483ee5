"""Exact tiles: layers with a limited receptive field run on rectangles of the frame with a halo.

A tile is computed from a rectangle that is larger by the reach of all layers after it, and the
margin that its edges affect is cut off: nothing is blended. From its last temporal upsampling on, a
decoder of Wan sees 20 pixels of its output. Layers that see the whole frame, such as attention, run
at latent size: the first ones of a decoder, the last ones of an encoder.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..layers.causal_layer import CausalLayer
from ..layers.temporal_cache import TemporalCache, canonical
from ..models.base import Network
from ..models.receptive_field import Size, Span, is_encoder, reach
from .job import StreamJob

Chains = list[list[CausalLayer]]


@dataclass(frozen=True)
class Tiles:
    """The cut of the frames of a stream."""

    cut: int  # layers before it, on whole frames in a decoder, in tiles in an encoder
    size: Size  # largest height and width, in pixels of the network's frames
    within: tuple[Span, Span] | None = None  # rows and columns of the output that they cover


@dataclass(frozen=True)
class FrameTile:
    """One rectangle, from the layers before it to its rows and columns of the output."""

    rows: Span
    columns: Span
    chains: Chains  # the tiled layers with crops
    layers: list[CausalLayer]  # without crops, in order

    @property
    def seen(self) -> tuple[slice, slice]:
        """Rows and columns of the frames before the tiled layers that it sees."""
        crop = self.chains[0][0]
        assert isinstance(crop, Crop)
        return crop.rows, crop.columns

    @property
    def pixels(self) -> int:
        """Pixels that it keeps of the frames of all sizes."""
        crops = (each for chain in self.chains for each in chain if isinstance(each, Crop))
        spans = ((each.rows, each.columns) for each in crops)
        return sum(math.prod(span.stop - span.start for span in pair) for pair in spans)


@dataclass(frozen=True)
class Sight:
    """What a layer sees of whole frames."""

    parts: tuple[tuple[int, int, int], ...]  # factor, divisor and reach
    merged: int  # rows that become one
    keeps: bool  # frames keep their size

    @classmethod
    def of(cls, layer: CausalLayer) -> "Sight":
        """Return what `layer` sees."""
        parts = tuple((*part.scale.as_integer_ratio(), reach(part)) for part in layer.blocks)
        return cls(parts, max(1, int(1 / layer.scale)), layer.scale == 1)


class Crop(CausalLayer):
    """A layer that copies a rectangle of the frames; its input can be shared with other tiles."""

    def __init__(self, rows: Span, columns: Span) -> None:
        super().__init__()
        self.rows, self.columns = slice(*rows), slice(*columns)

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Return `[B, C, T, rows, columns]` of `x` `[B, C, T, H, W]`, whatever the `cache`."""
        part = x[..., self.rows, self.columns]
        return canonical(part.clone(memory_format=torch.channels_last_3d))


def can_cut(network: Network) -> list[int]:
    """Return numbers of layers before a cut into whole frames and tiles, the fewest tiled first."""
    layers = network.layers()
    seeing = _seeing(network)
    if is_encoder(network):
        cuts = range(1, seeing[0] + 1 if seeing else len(layers))
        return [cut for cut in cuts if layers[cut - 1].scale < 1]
    cuts = range(len(layers) - 1, (seeing[-1] if seeing else 0), -1)
    return [cut for cut in cuts if layers[cut].scale > 1]


def band_cuts(network: Network) -> list[int]:
    """Return numbers of layers before a cut into whole frames and bands."""
    # Every device runs the layers on whole frames, so in addition to the places of tiles there is
    # one next to the layers that see whole frames, which leaves the fewest layers there.
    cuts = can_cut(network)
    seeing = _seeing(network)
    if cuts and seeing:
        cuts.append(seeing[0] if is_encoder(network) else seeing[-1] + 1)
    return list(dict.fromkeys(cuts))


def _seeing(network: Network) -> list[int]:
    """Return the indices of the layers that see whole frames."""
    return [
        index
        for index, layer in enumerate(network.layers())
        if any(part.sees_all for part in layer.blocks)
    ]


def divided(chains: Sequence[Sequence[CausalLayer]], count: int) -> tuple[Chains, Chains]:
    """Return the first `count` layers of `chains`, and the others."""
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
    """Return rows and columns of tiles of frames of `size`: nearly equal, at most `tile` large."""
    rows, columns = (_spans(*pair) for pair in zip(size, tile, strict=True))
    return list(itertools.product(rows, columns))


def make_tile(chains: Chains, size: Size, rows: Span, columns: Span) -> FrameTile:
    """Return one rectangle of the output of the tiled layers, whose whole input has this `size`."""
    layers = [layer for chain in chains for layer in chain]
    sights = [Sight.of(layer) for layer in layers]
    down, across = (spans_before(sights, *each) for each in zip(size, (rows, columns), strict=True))
    needed = list(zip(down, across, strict=True))
    have = needed[0]
    made: Chains = []
    seen = 0
    for chain in chains:
        made.append([])
        for layer in chain:
            if not seen:
                made[-1].append(Crop(*have))
            made[-1].append(layer)
            seen += 1
            # Where the size changes, cut off what the next layers do not need; immediately, because
            # a layer that takes pairs of frames must start its chain.
            if layer.scale != 1 or seen == len(layers):
                made[-1] += _crop(have, layer.scale, needed[seen])
                have = needed[seen]
    return FrameTile(rows, columns, made, layers)


def places(job: StreamJob, tiles: Tiles) -> list[tuple[Span, Span]]:
    """Return rows and columns of the output of each tile."""
    end = job.sizes[tiles.cut] if job.encodes else job.end
    down = max(1, job.end[0] // end[0])
    (top, bottom), (left, right) = tiles.within or ((0, end[0]), (0, end[1]))
    most = max(1, tiles.size[0] // down), max(1, tiles.size[1] // down)
    found = grid((bottom - top, right - left), most)
    return [((top + y[0], top + y[1]), (left + x[0], left + x[1])) for y, x in found]


def cut_tiles(job: StreamJob, tiles: Tiles) -> tuple[Chains, list[FrameTile], Size]:
    """Return the layers on whole frames, the tiles, and height and width before them."""
    first, rest = divided(job.network.chains(), tiles.cut)
    whole, tiled = (rest, first) if job.encodes else (first, rest)
    size = job.end if job.encodes else job.sizes[tiles.cut]
    return whole, [make_tile(tiled, size, *each) for each in places(job, tiles)], size


def lengths_before(layers: Sequence[Sight], length: int, span: Span) -> list[int]:
    """Return the lengths of a tile before each layer and after the last, as `make_tile` cuts it."""
    spans = spans_before(layers, length, span)
    given = [spans[0][1] - spans[0][0]]
    for layer, (start, stop) in zip(layers, spans[1:], strict=True):
        given.append(given[-1] if layer.keeps else stop - start)
    given[-1] = span[1] - span[0]
    return given


def spans_before(layers: Sequence[Sight], length: int, span: Span) -> list[Span]:
    """Return the part of whole frames that a tile needs before each layer and after the last.

    `length` is that of whole frames before the first layer, and `span` is in the output.
    """
    lengths = [length]
    for layer in layers:
        for up, down, _ in layer.parts:
            lengths.append(lengths[-1] * up // down)
    spans, block, at = [span], 1, len(lengths) - 1
    for layer in reversed(layers):
        # Pixels that are merged into one stay together, from the first layer on.
        block = max(block, layer.merged)
        start, stop = spans[-1]
        for up, down, sees in reversed(layer.parts):
            at -= 1
            # A layer that enlarges frames has its reach in pixels of the larger frames.
            large, small = (sees, 0) if up > 1 else (0, sees)
            start = (start - large) * down // up - small
            stop = -((stop + large) * down // -up) + small
            start, stop = start // block * block, -(-stop // block) * block
            start, stop = max(0, start), min(lengths[at], stop)
        spans.append((start, stop))
    return spans[::-1]


def _crop(before: tuple[Span, Span], scale: Fraction, want: tuple[Span, Span]) -> list[CausalLayer]:
    """Return the crop from a scaled rectangle to another, both in pixels of the whole frame."""
    have = tuple((int(start * scale), int(stop * scale)) for start, stop in before)
    if have == want:
        return []
    spans = [(new[0] - old[0], new[1] - old[0]) for old, new in zip(have, want, strict=True)]
    return [Crop(*spans)]


def _spans(length: int, most: int) -> list[Span]:
    count = max(1, -(-length // max(1, most)))
    edges = [length * index // count for index in range(count + 1)]
    return list(itertools.pairwise(edges))
