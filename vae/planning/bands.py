"""Bands: the frames of a video divided between devices, each with the rim that its layers need.

Every device runs the layers on whole frames itself (in an encode the first one does), and the
others on its band, as tiles do. So nothing is exchanged while layers run, and the values are those
of one device. Of all cuts, in rows or columns, the one is taken whose slowest device has the fewest
products.
"""

import bisect
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..models.receptive_field import Span
from .job import StreamJob
from .tiling import Sight, Tiles, lengths_before

# Halvings of the interval of the longest time of a band; the last one is 0.02 % of it.
_STEPS = 12

_AXES = ("rows", "columns")


@dataclass(frozen=True)
class Place:
    """A device that can have a band."""

    name: str
    device: torch.device
    share: float  # of the work, next to those of the others
    limit_bytes: int  # of its memory


@dataclass(frozen=True)
class Band:
    """The part of one device."""

    number: int  # in the list of the VAE
    name: str
    device: torch.device
    tiles: Tiles  # in `within`, the band; one has its size
    part_bytes: int  # an activation above this size is divided in time
    peak_bytes: int  # estimated, without weights, input and output
    parked: bool  # tails of a tile are on the host while it does not run
    count: int  # of the tiles

    def span(self, axis: int) -> Span:
        """Return its rows (0) or columns (1) in the output of the tiled layers."""
        return self.tiles.within[axis] if self.tiles.within else (0, 0)


@dataclass(frozen=True)
class Bands:
    """The division of the frames of a stream between devices."""

    axis: int  # 0: bands of rows; 1: of columns
    chunk: int  # latents per step
    members: tuple[Band, ...]  # in order; the first device has one of them
    pixels: int  # of an image per pixel along the axis
    holds: bool  # the devices can hold every tensor

    def __str__(self) -> str:
        parts = []
        for band in self.members:
            start, stop = (self.pixels * edge for edge in band.span(self.axis))
            tiles = f" in {band.count} tiles" if band.count > 1 else ""
            host = ", caches on the host" if band.parked else ""
            size = f"about {band.peak_bytes / 2**20:.0f} MiB"
            parts.append(f"{band.name} {start}-{stop - 1}{tiles} ({size}{host})")
        return f"bands of {_AXES[self.axis]}: {', '.join(parts)}"


@dataclass(frozen=True)
class Division:
    """A cut, and the spans of the devices along an axis, by number."""

    cut: int
    axis: int
    length: int  # of the output of the tiled layers
    spans: dict[int, Span]
    time: float  # products per latent and share of the slowest device, with joining in an encode


def divide(
    job: StreamJob, cut: int, axis: int, shares: Mapping[int, float], first: int
) -> Division:
    """Return the division at a cut along an axis, whose devices work in proportion to `shares`.

    A device other than `first` whose share is too small has no span.
    """
    works = job.works
    tiled = slice(0, cut) if job.encodes else slice(cut, len(works))
    layers = [Sight.of(layer) for layer in job.network.layers()[tiled]]
    whole = float(sum(works) - sum(works[tiled]))
    before, length = (job.sizes[at][axis] for at in (tiled.start, tiled.stop))
    lengths = lengths_before(layers, before, (0, length))
    per_pixel = [work / each for work, each in zip(works[tiled], lengths, strict=False)]

    @functools.cache
    def products(start: int, stop: int) -> float:
        sizes = lengths_before(layers, before, (start, stop))
        own = sum(map(float.__mul__, per_pixel, map(float, sizes)))
        return own if job.encodes else own + whole

    # Bands begin at pixels of the frames before the tiled layers, which need no rim there.
    unit = 1 if job.encodes else max(1, length // before)
    spans = _balanced(products, range(unit, length + 1, unit), shares, first)
    time = max(products(*span) / shares[number] for number, span in spans.items())
    time += whole / shares[first] if job.encodes else 0.0
    return Division(cut, axis, length, spans, time)


def _balanced(
    products: Callable[[int, int], float], stops: range, shares: Mapping[int, float], first: int
) -> dict[int, Span]:
    """Return the spans with the fewest products per share of a device."""
    best = {first: (0, stops[-1])}
    low, high = 0.0, products(0, stops[-1]) / shares[first]
    for _ in range(_STEPS):
        middle = (low + high) / 2
        spans, at, index = dict[int, Span](), 0, 0
        for number, share in shares.items():
            work = functools.partial(products, at)
            end = bisect.bisect_right(stops, middle * share, lo=index, key=work)
            if end > index:
                spans[number] = at, stops[end - 1]
                at, index = stops[end - 1], end
        if index == len(stops) and first in spans:
            best, high = spans, middle
        else:
            low = middle
    return best
