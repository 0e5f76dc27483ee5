"""Bands: the frames of a video divided between devices, each with the halo that its layers need.

Every device runs the layers on whole frames itself (in an encoder the first one does), and the
others on its band, as tiles do. So nothing is exchanged while layers run, and the values are those
of one device. The cut, rows or columns, and the bands are those with the fewest predicted seconds.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..models.receptive_field import Size, Span
from .candidates import Candidate, StepChoice, lengths_of, parked_chunks
from .cost import tiled_cost
from .device_memory import free_bytes
from .division import Division
from .job import StreamJob
from .ledger import TOO_MUCH_BYTES
from .tiling import Tiles, band_cuts, grid

# Devices whose share of the frames saves less than this part of the time are left out.
_WORTH_IT = 0.02

# The speed of a CPU next to a GPU. Devices of one type are taken to be equal.
_CPU_SPEED = 0.02

# Numbers of rows and columns of the tiles of a band, for when its memory is short.
_GRIDS = ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (8, 2), (8, 4), (12, 6), (16, 9))

_AXES = ("rows", "columns")


@dataclass(frozen=True)
class Band:
    """The part of one device."""

    number: int  # in the list of the VAE
    device: torch.device
    span: Span  # rows or columns in the output of the tiled layers
    tiles: tuple[tuple[Span, Span], ...]  # rows and columns of each; one: the band itself
    part_bytes: int  # an activation above this size is divided in time
    peak_bytes: int  # estimated, without weights, input and output
    parked: bool  # tails of a tile are on the host while it does not run


@dataclass(frozen=True)
class Bands:
    """The division of the frames of a stream between devices."""

    cut: int  # layers before it, as in `Tiles`
    axis: int  # 0: bands of rows; 1: of columns
    chunk: int  # latents per step
    members: tuple[Band, ...]  # in order; the first device has one of them
    pixels: int  # of an image per pixel along the axis
    latent_s: float  # predicted seconds per latent
    holds: bool  # the devices can hold every tensor

    def __str__(self) -> str:
        parts = []
        for band in self.members:
            start, stop = (self.pixels * edge for edge in band.span)
            tiles = f" in {len(band.tiles)} tiles" if len(band.tiles) > 1 else ""
            host = ", caches on the host" if band.parked else ""
            size = f"about {band.peak_bytes / 2**20:.0f} MiB"
            parts.append(f"{band.device} {start}-{stop - 1}{tiles} ({size}{host})")
        return f"bands of {_AXES[self.axis]}: {', '.join(parts)}"


@dataclass(frozen=True)
class BandPlanner:
    """Plans the bands of a stream."""

    job: StreamJob  # on the first device
    devices: Mapping[int, torch.device]  # by number, in order; `first` is one of them
    first: int
    limit_bytes: int | None = None  # of each device; None: a share of its free memory
    tile: Size | None = None  # in pixels of the images; None: chosen by memory
    chunk: int | None = None  # latents per step; None: chosen for the first device

    def plan(self) -> Bands | None:
        """Return the fastest bands; None: the first device is as fast, or there is no cut."""
        divisions = [
            Division(self.job, cut, axis)
            for cut in band_cuts(self.job.network)
            for axis in range(2)
        ]
        found: list[tuple[float, Division]] = []
        for division in divisions:
            even = division.even(self.speeds)
            if len(even) > 1 and self.first in even:
                found.append((division.seconds(even, self.speeds, self.first), division))
        best: Bands | None = None
        for least_s, division in sorted(found, key=lambda pair: pair[0]):
            # Tiles of bands take longer than that.
            if best is not None and self._fits(best) and least_s >= best.latent_s:
                break
            spans = self._worthwhile(division)
            if len(spans) > 1:
                bands = self._bands(division, spans)
                best = min((each for each in (best, bands) if each), key=self._rank)
        return best

    @functools.cached_property
    def speeds(self) -> dict[int, float]:
        """The assumed products per second of all devices, by number."""
        rate = self.job.rates.products_per_s
        unequal = len({device.type for device in self.devices.values()}) > 1
        return {
            number: rate * (_CPU_SPEED if unequal and device.type == "cpu" else 1.0)
            for number, device in self.devices.items()
        }

    def _rank(self, bands: Bands) -> tuple[float, float]:
        """Return what is smallest for the best bands: memory that is missing, then seconds."""
        needed = max(band.peak_bytes / self._limits[band.device] for band in bands.members)
        return 0.0 if self._fits(bands) else needed, bands.latent_s

    def _fits(self, bands: Bands) -> bool:
        return all(band.peak_bytes <= self._limits[band.device] for band in bands.members)

    def _worthwhile(self, division: Division) -> dict[int, Span]:
        """Return balanced bands of the devices that are worth it."""
        speeds = self.speeds
        spans = division.balanced(speeds, self.first)
        while len(spans) > 1:
            slowest = min(
                (number for number in spans if number != self.first),
                key=lambda number: (speeds[number], -number),
            )
            fewer = {number: speeds[number] for number in spans if number != slowest}
            without = division.balanced(fewer, self.first)
            more_s, less_s = (
                division.seconds(each, speeds, self.first) for each in (spans, without)
            )
            if more_s < (1 - _WORTH_IT) * less_s:
                break
            spans = without
        return spans

    def _bands(self, division: Division, spans: Mapping[int, Span]) -> Bands:
        chunk, made, holds, latent_s = self.chunk, {}, True, 0.0
        rate = self.job.rates.products_per_s
        # The first device chooses the length of the steps.
        for number in sorted(spans, key=lambda number: number != self.first):
            made[number], choice = self._band(division, number, spans[number], chunk)
            chunk = chunk or choice.chunk
            holds = holds and choice.peak_bytes < TOO_MUCH_BYTES
            latent_s = max(latent_s, choice.seconds * rate / self.speeds[number])
        members = tuple(made[number] for number in spans)
        pixels = self.job.pixels
        if self.job.spec.encodes:
            pixels *= self.job.end[division.axis] // division.length
        return Bands(division.cut, division.axis, chunk or 1, members, pixels, latent_s, holds)

    def _band(
        self, division: Division, number: int, span: Span, chunk: int | None
    ) -> tuple[Band, StepChoice]:
        """Return the band of a device, in as few tiles as its memory allows."""
        device = self.devices[number]
        job = replace(self.job, device=device)
        best: tuple[StepChoice, list[tuple[Span, Span]]] | None = None
        for tiles, candidate in self._candidates(job, division, span, chunk):
            choice = candidate.fastest(self._limits[device])
            if choice is not None:
                best = choice, tiles
                break
            smallest = candidate.smallest
            if best is None or smallest.peak_bytes < best[0].peak_bytes:
                best = smallest, tiles
        if best is None:
            raise ValueError("a band has no tiles; expected at least one")
        choice, tiles = best
        peak_bytes = choice.peak_bytes % TOO_MUCH_BYTES
        args = (number, device, span, tuple(tiles), choice.part_bytes, peak_bytes, choice.parked)
        return Band(*args), choice

    def _candidates(
        self, job: StreamJob, division: Division, span: Span, chunk: int | None
    ) -> Iterator[tuple[list[tuple[Span, Span]], Candidate]]:
        """Yield the possible tiles of a band, the fastest first."""
        output = job.sizes[division.cut] if job.spec.encodes else job.end
        size = list(output)
        size[division.axis] = span[1] - span[0]
        tails = (False,) if job.device.type == "cpu" or job.single_frame else (False, True)
        for parked, tile in itertools.product(tails, self._tile_sizes(job, output, size)):
            tiles = [
                _moved(each, division.axis, span[0]) for each in grid((size[0], size[1]), tile)
            ]
            stream = tiled_cost(job.spec, job.setting, job.start, division.cut, tiles)
            for latents in parked_chunks(chunk) if parked else (chunk,):
                given = replace(stream, parked=parked)
                lengths = lengths_of(job, given, latents)
                yield tiles, Candidate(job, given, Tiles(division.cut, tile), lengths)

    def _tile_sizes(self, job: StreamJob, output: Size, size: Sequence[int]) -> list[Size]:
        """Return heights and widths of the tiles of a band of `size` in frames of `output`."""
        if self.tile is not None:
            down = job.pixels * max(1, job.end[0] // output[0])
            rows, columns = (max(1, length // down) for length in self.tile)
            return [(min(size[0], rows), min(size[1], columns))]
        sizes = [(-(-size[0] // rows), -(-size[1] // columns)) for rows, columns in _GRIDS]
        return list(dict.fromkeys(sizes))

    @functools.cached_property
    def _limits(self) -> dict[torch.device, int]:
        """The memory that the band of each device may take, at least one byte."""
        limits: dict[torch.device, int] = {}
        devices = list(self.devices.values())
        for device in set(devices):
            limit = self.limit_bytes
            if limit is None:
                share, _ = replace(self.job, device=device).shares
                limit = int(free_bytes(device) * share)
            limits[device] = max(1, limit // devices.count(device))
        return limits


def _moved(tile: tuple[Span, Span], axis: int, start: int) -> tuple[Span, Span]:
    """Return rows and columns moved by `start` along an axis."""
    rows, columns = (
        (span[0] + start, span[1] + start) if axis == at else span for at, span in enumerate(tile)
    )
    return rows, columns
