"""The possible plans of a stream: whole frames or tiles, with steps and parts of any size.

Most of the many candidates need no look: each has a lower bound of its seconds, from its products
and the passes of the longest steps on whole frames.
"""

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from ..models.base import Network, unwrapped
from ..models.receptive_field import Size, Span
from .cost import StepCost, StreamCost, tiled_cost, whole_cost
from .job import StreamJob
from .tiling import Chains, FrameTile, Tiles, can_cut, divided, grid, make_tile

# On a CPU an activation of this size stays in the last-level cache, and in memory that malloc
# reuses: glibc maps every block over 32 MB from the system, which takes about as long as the
# convolution that fills it.
_CPU_PART_BYTES = 24 << 20

# On a GPU: large enough to fill it, small enough to leave memory for other uses.
_DEVICE_PART_BYTES = 1 << 30

# Smallest part, for when memory is short; a larger single frame is not divided.
_SMALLEST_PART_BYTES = 1 << 20

# More latents per step gained nothing measurable, and delay the first frames.
_MOST_LATENTS = 4

# Latents per step with caches on the host: longer steps copy less.
_PARKED_LATENTS = (4, 8, 16, 32)

# Parts below this size cost too many launches; only the shortest steps use them.
_SMALL_PART_BYTES = 128 << 20

# Numbers of rows and columns of tiles to try.
_GRIDS = ((2, 1), (3, 1), (4, 1), (6, 1), (4, 2), (8, 1), (6, 2), (8, 2), (8, 4), (12, 6), (16, 9))
_SMALLEST_TILE = 32


@dataclass(frozen=True)
class StepChoice:
    """Steps of one length on whole frames or certain tiles."""

    chunk: int  # latents per step
    part_bytes: int  # an activation above this size is divided in time
    step: StepCost
    seconds: float  # predicted, per latent
    tiles: Tiles | None  # None: whole frames
    parked: bool  # tails of a tile are on the host while it does not run

    @property
    def peak_bytes(self) -> int:
        """Estimated memory without weights, input and output."""
        return self.step.peak_bytes


class Candidates:
    """All choices for a stream, or for a `band` of it, which is one tile or more.

    `tile` is in pixels of the images, and `chunk` in latents, if they are given.
    """

    def __init__(
        self,
        job: StreamJob,
        tile: Size | None,
        chunk: int | None,
        *,
        cuts: bool,
        band: Tiles | None = None,
    ) -> None:
        self._job, self._chunk, self._cuts, self._band = job, chunk, cuts, band
        self._sizes = _tile_sizes(job, tile, band)
        stream = whole_cost(job.spec, job.setting, job.start)
        self._whole = Candidate(job, stream, None, lengths_of(job, stream, chunk))
        self._only_tiles = band is not None or (
            tile is not None and bool(self._sizes and can_cut(job.network))
        )

    def fastest(self, limit_bytes: int, *, parks: bool = True) -> StepChoice | None:
        """Return the fastest choice within a limit, or None; `parks`: caches can be on the host."""
        best: StepChoice | None = None
        for candidate in self._in_order():
            if best is not None and self._least_s(candidate) >= best.seconds:
                break
            parked = candidate.stream.parked
            if (parked and not parks) or candidate.stream.kept_bytes > limit_bytes:
                continue
            choice = candidate.fastest(limit_bytes)
            if choice is not None and (best is None or choice.seconds < best.seconds):
                best = choice
        return best

    @property
    def smallest(self) -> StepChoice:
        """The choice that needs the least memory."""
        candidates = sorted(self._in_order(), key=lambda each: each.stream.kept_bytes)
        best = candidates[0].smallest
        for candidate in candidates[1:]:
            # The tails alone exceed the best choice, in this candidate and in all others.
            if candidate.stream.kept_bytes >= best.peak_bytes:
                break
            best = min(best, candidate.smallest, key=lambda choice: choice.peak_bytes)
        return best

    def _in_order(self) -> Iterator["Candidate"]:
        """Yield whole frames, then tiles in order of their least seconds."""
        if not self._only_tiles:
            yield self._whole
        if self._cuts:
            yield from self._tiled

    @functools.cached_property
    def _tiled(self) -> list["Candidate"]:
        cuts = [Tiles(cut, (0, 0)) for cut in can_cut(self._job.network)]
        if self._band is not None:
            cuts = [self._band]
        tiles = [replace(cut, size=size) for cut in cuts for size in self._sizes]
        candidates = [each for one in tiles for each in _candidates_in(self._job, one, self._chunk)]
        return sorted(candidates, key=self._least_s)

    def _least_s(self, candidate: "Candidate") -> float:
        """Return a lower bound of the seconds of a candidate."""
        share = candidate.stream.work / self._whole.stream.work
        return share * self._whole.longest.seconds + candidate.parking_s


def kept_candidates(
    job: StreamJob, tile: Size | None, chunk: int | None, *, cuts: bool
) -> Candidates:
    """Return the `Candidates`, whose estimates stay with the network of `job`."""
    # They take 8 to 150 ms, and depend on no memory, which is looked up for each video.
    network = unwrapped(job.network)
    size = job.latent_size, job.pixels, tile and tuple(tile), chunk, cuts
    key = *size, job.dtype, job.device, job.coded, job.setting

    def make() -> Candidates:
        bare = replace(job, network=cast(Network, weakref.proxy(network)))
        return Candidates(bare, tile, chunk, cuts=cuts)

    return network.kept.of(key, make)


@dataclass(frozen=True)
class Candidate:
    """Whole frames or certain tiles, with steps of any length."""

    job: StreamJob
    stream: StreamCost
    tiles: Tiles | None  # None: whole frames
    lengths: list[tuple[int, int]]  # as from `lengths_of`
    _known: dict[tuple[int, int], StepChoice] = field(default_factory=dict)

    def fastest(self, limit_bytes: int) -> StepChoice | None:
        """Return the fastest choice within `limit_bytes`, or None."""
        # Most of the many candidates with tiles do not fit.
        if self.tiles is not None and self.smallest.peak_bytes > limit_bytes:
            return None
        # Nothing is much faster than the longest steps, so the others need no look.
        if self.longest.peak_bytes <= limit_bytes:
            return self.longest
        best: StepChoice | None = None
        done = 0  # the chunk whose largest fitting parts were found
        for chunk, part_bytes in self.lengths:
            if chunk == done:  # smaller parts of the same steps are slower
                continue
            choice = self._choice(chunk, part_bytes)
            if choice.peak_bytes <= limit_bytes:
                done = chunk
                if best is None or choice.seconds < best.seconds:
                    best = choice
        return best

    @functools.cached_property
    def longest(self) -> StepChoice:
        """The choice with the longest steps in the largest parts."""
        return self._choice(*self.lengths[0])

    @functools.cached_property
    def smallest(self) -> StepChoice:
        """The choice with the least memory; with tiles the one with the shortest steps."""
        lengths = self.lengths if self.tiles is None else self.lengths[-1:]
        choices = [self._choice(*length) for length in lengths]
        return min(choices, key=lambda choice: choice.peak_bytes)

    @property
    def parking_s(self) -> float:
        """Seconds per latent of the copies between device and host."""
        chunk = self.lengths[0][0]
        return self.stream.parked_bytes / chunk / self.job.rates.host_bytes_per_s

    def _choice(self, chunk: int, part_bytes: int) -> StepChoice:
        if (known := self._known.get((chunk, part_bytes))) is not None:
            return known
        step, rates = self.stream.step(chunk, part_bytes), self.job.rates
        seconds = (
            self.stream.work / rates.products_per_s
            + step.moved_bytes / rates.bytes_per_s
            + step.launches * rates.launch_s
            + self.parking_s
        )
        made = StepChoice(chunk, part_bytes, step, seconds, self.tiles, self.stream.parked)
        self._known[chunk, part_bytes] = made
        return made


def places(job: StreamJob, tiles: Tiles) -> list[tuple[Span, Span]]:
    """Return rows and columns of the output of each tile."""
    end = job.sizes[tiles.cut] if job.spec.encodes else job.end
    down = max(1, job.end[0] // end[0])
    (top, bottom), (left, right) = tiles.within or ((0, end[0]), (0, end[1]))
    most = max(1, tiles.size[0] // down), max(1, tiles.size[1] // down)
    found = grid((bottom - top, right - left), most)
    return [((top + y[0], top + y[1]), (left + x[0], left + x[1])) for y, x in found]


def cut_tiles(job: StreamJob, tiles: Tiles) -> tuple[Chains, list[FrameTile], Size]:
    """Return the layers on whole frames, the tiles, and height and width before them."""
    first, rest = divided(job.network.chains(), tiles.cut)
    whole, tiled = (rest, first) if job.spec.encodes else (first, rest)
    size = job.end if job.spec.encodes else job.sizes[tiles.cut]
    return whole, [make_tile(tiled, size, *each) for each in places(job, tiles)], size


def _tile_sizes(job: StreamJob, tile: Size | None, band: Tiles | None) -> list[Size]:
    """Return sizes of tiles in pixels of the tiled end; none if `tile` is all of the frames."""
    height, width = job.end if band is None else band.size
    if tile is not None:
        rows, columns = (max(1, length // job.pixels) for length in tile)
        size = min(height, rows), min(width, columns)
        return [] if size == job.end else [size]
    sizes = [(-(-height // rows), -(-width // columns)) for rows, columns in _GRIDS]
    large = [size for size in dict.fromkeys(sizes) if min(size) * job.pixels >= _SMALLEST_TILE]
    return large if band is None else list(dict.fromkeys([band.size, *large]))


def _candidates_in(job: StreamJob, tiles: Tiles, chunk: int | None) -> Iterator[Candidate]:
    """Yield the candidates for these tiles: tails on the device, or on the host."""
    stream = tiled_cost(job.spec, job.setting, job.start, tiles.cut, places(job, tiles))
    yield Candidate(job, stream, tiles, lengths_of(job, stream, chunk))
    if job.device.type == "cpu" or job.single_frame:
        return
    stream = replace(stream, parked=True)
    for latents in parked_chunks(chunk):
        yield Candidate(job, stream, tiles, lengths_of(job, stream, latents))


def parked_chunks(chunk: int | None) -> tuple[int, ...]:
    """Return the possible latents per step with caches on the host, or the given `chunk`."""
    return _PARKED_LATENTS if chunk is None else (chunk,)


def lengths_of(job: StreamJob, stream: StreamCost, chunk: int | None) -> list[tuple[int, int]]:
    """Return latents per step and size of a part, the longest steps first."""
    on_cpu = job.device.type == "cpu"
    part = _CPU_PART_BYTES if on_cpu else _DEVICE_PART_BYTES
    most = max(1, min(_MOST_LATENTS, part // max(1, stream.latent_bytes)))
    chunks = range(most, 0, -1) if on_cpu else sorted({most, min(2, most), 1}, reverse=True)
    if job.single_frame:
        chunks = (1,)
    elif chunk is not None:
        chunks = (chunk if chunk > 0 else _MOST_LATENTS,)
    least = part if on_cpu else min(part, _SMALL_PART_BYTES)
    lengths = [(each, size) for each in chunks for size in _halved(part, least)]
    return lengths + [(chunks[-1], size) for size in _halved(least // 2, _SMALLEST_PART_BYTES)]


def _halved(size: int, least: int) -> list[int]:
    """Return `size`, half of it and so on, at least `least`."""
    sizes = []
    while size >= least:
        sizes.append(size)
        size //= 2
    return sizes
