"""The choice of a plan: the length of steps, the tiles, and the place of the tails.

Settings are looked at in a fixed order: whole frames in smaller and smaller parts, the fewest
tiles, then tiles whose tails wait on the host. Of those that fit into the memory the one counts
that moves the fewest bytes, and of those within 3 % of it the one that needs the least memory.
"""

import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from ..models.base import Network, unwrapped
from ..models.receptive_field import Size
from .bands import Band, Bands, Place, divide
from .device_memory import free_bytes, total_bytes
from .frames import Frames, Plan, places
from .job import StreamJob
from .tiling import Tiles, band_cuts, can_cut

# Sizes of parts on a GPU. The first one fills it, and below the last one a part is a frame.
_PARTS = (1 << 30, 1 << 29, 1 << 28)

# On a CPU an activation of this size stays in the last-level cache, and in memory that malloc
# reuses: glibc maps every block over 32 MB from the system, which takes about as long as the
# convolution that fills it.
_CPU_PARTS = (24 << 20,)

# Parts for when memory is short; a larger single frame is not divided.
_SMALL_PARTS = (1 << 27, 1 << 26, 1 << 24, 1 << 20)

# Latents per step. More gained nothing measurable, and delay the first frames. With tails on the
# host longer steps copy less.
_LATENTS = (4, 3, 2, 1)
_PARKED_LATENTS = (32, 16, 8, 4)

# Numbers of rows and columns of tiles.
_GRIDS = ((2, 1), (3, 1), (4, 1), (6, 1), (4, 2), (8, 1), (6, 2), (8, 2), (8, 4), (12, 6), (16, 9))
_SMALLEST_TILE = 32

# Bytes that a step may move more where it needs less memory, and those of whole frames, next to the
# fewest, for which no tiles are looked at.
_MORE, _NEAR = 1.03, 1.1


class Settings:
    """The settings of a stream, or of a `band` of it, in the order in which they are tried."""

    def __init__(
        self,
        job: StreamJob,
        tile: Size | None,
        chunk: int | None,
        *,
        cuts: bool,
        band: Tiles | None,
    ) -> None:
        self._job, self._chunk, self._band = job, chunk, band
        self._on_cpu = job.device.type == "cpu"
        self._frames: dict[Tiles | None, Frames] = {}
        self._sizes = _tile_sizes(job, tile, band) if cuts else []
        self._cuts = can_cut(job.network) if band is None else [band.cut]
        if not self._cuts:
            self._sizes = []
        self._only_tiles = band is not None or (tile is not None and bool(self._sizes))
        self._last: tuple[tuple[int, int], Plan] | None = None  # the limits, and their plan

    def first(self, usual: int, most: int) -> Plan:
        """Return the first plan within the `usual` limit; within `most` if there is none."""
        if self._last is None or self._last[0] != (usual, most):
            self._last = (usual, most), self._first(usual, most)
        return self._last[1]

    @functools.cached_property
    def smallest(self) -> Plan:
        """The plan that needs the least memory."""
        whole = () if self._only_tiles else self._whole()
        groups = itertools.chain(whole, self._tiled(), self._tiled(parked=True))
        return min(itertools.chain(*groups), key=lambda plan: (not plan.holds, plan.peak_bytes))

    def _first(self, usual: int, most: int) -> Plan:
        # More of the memory only instead of tiles.
        best = None if self._only_tiles else _fitting(self._whole(), usual)
        if best is not None:
            least = min(plan.cost_bytes for plan in next(self._whole()))
            if best.cost_bytes <= _NEAR * least:
                return best
        found = [best, _fitting(self._tiled(usual), usual)]
        if not any(found):
            whole = iter(()) if self._only_tiles else self._whole()
            found = [_fitting(whole, most), _fitting(self._tiled(most), most)]
        found.append(_fitting(self._tiled(usual, parked=True), usual))
        if not any(found):
            found.append(_fitting(self._tiled(most, parked=True), most))
        known = [plan for plan in found if plan is not None]
        return min(known, key=lambda plan: plan.cost_bytes) if known else self.smallest

    def _whole(self) -> Iterator[list[Plan]]:
        """Yield the plans of whole frames, of one size of parts after the other."""
        for chunks, part in self._steps(_LATENTS):
            yield [self._at(None).plan(chunk, part) for chunk in chunks]

    def _tiled(self, limit: float | None = None, *, parked: bool = False) -> Iterator[list[Plan]]:
        """Yield the plans of tiles within a limit, of one grid after the other.

        Without a limit, the ones that need the least memory.
        """
        if parked and not self._job.parks:
            return
        steps = self._steps(_PARKED_LATENTS if parked else _LATENTS)
        for size in self._sizes:
            group: list[Plan] = []
            for frames in (self._at(self._tiles(cut, size)) for cut in self._cuts):
                plan = functools.partial(frames.plan, parked=parked)
                least = plan(steps[-1][0][-1], steps[-1][1])
                if limit is None:
                    group.append(least)
                elif _fits(least, limit):
                    group += [plan(chunk, part) for chunks, part in steps for chunk in chunks]
            if group:
                yield group

    def _steps(self, latents: Sequence[int]) -> list[tuple[Sequence[int], int]]:
        """Return the lengths of steps for each size of parts; the smallest for short ones only."""
        if self._job.single_frame:
            latents = (1,)
        elif self._chunk is not None:
            latents = (self._chunk if self._chunk > 0 else _LATENTS[0],)
        parts = _CPU_PARTS if self._on_cpu else _PARTS
        return [(latents, part) for part in parts] + [(latents[-1:], part) for part in _SMALL_PARTS]

    def _at(self, tiles: Tiles | None) -> Frames:
        if tiles not in self._frames:
            self._frames[tiles] = Frames(self._job, tiles)
        return self._frames[tiles]

    def _tiles(self, cut: int, size: Size) -> Tiles:
        return Tiles(cut, size) if self._band is None else replace(self._band, size=size)


def _fits(plan: Plan, limit: float) -> bool:
    return plan.holds and plan.peak_bytes <= limit


def _fitting(groups: Iterator[list[Plan]], limit: int) -> Plan | None:
    """Return the plan within a limit that moves the fewest bytes, or hardly more with less memory.

    The search ends at a group whose plans all move more than the best one so far, or with small
    parts, which take longer than their bytes say.
    """
    best: Plan | None = None
    for group in groups:
        if best is not None and (
            group[0].part_bytes in _SMALL_PARTS
            or min(plan.cost_bytes for plan in group) > _MORE * best.cost_bytes
        ):
            break
        fitting = [plan for plan in [*group, best] if plan and _fits(plan, limit)]
        if fitting:
            most = _MORE * min(plan.cost_bytes for plan in fitting)
            near = [plan for plan in fitting if plan.cost_bytes <= most]
            best = min(near, key=lambda plan: plan.peak_bytes)
    return best


def make_plan(
    job: StreamJob,
    limit_bytes: int | None = None,
    *,
    chunk: int | None = None,
    tile: Size | None = None,
    cuts: bool = True,
    band: Tiles | None = None,
) -> Plan:
    """Return the first plan within a limit, or the smallest one.

    Args:
        job: The stream.
        limit_bytes: Memory limit of a step; None: a share of what is free.
        chunk: Latents per step; None: chosen.
        tile: Height and width of tiles in pixels of the images; None: chosen.
        cuts: Frames can be cut into tiles.
        band: The part of the frames to plan, in one tile or more; None: all.
    """
    size = None if tile is None else (tile[0], tile[1])
    settings = kept_settings(job, size, chunk, cuts=cuts, band=band)
    usual = most = limit_bytes or 0
    if limit_bytes is None:
        free = free_bytes(job.device)
        usual, most = (int(free * share) for share in job.shares)
    plan = settings.first(usual, most)
    return plan if chunk is None else replace(plan, chunk=chunk)


def kept_settings(
    job: StreamJob, tile: Size | None, chunk: int | None, *, cuts: bool, band: Tiles | None
) -> Settings:
    """Return the `Settings`, which stay with the network of `job`."""
    network = unwrapped(job.network)
    names = "latent_size", "dtype", "device", "single_frame", "pixels", "coded"
    key = *(getattr(job, name) for name in names), tile, chunk, cuts, band

    def make() -> Settings:
        bare = replace(job, network=cast(Network, weakref.proxy(network)))
        return Settings(bare, tile, chunk, cuts=cuts, band=band)

    return network.kept.of(key, make)


def check_plan(job: StreamJob, plan: Plan) -> None:
    """Raise a `ValueError` if a frame has tensors that are too large for the device."""
    if not plan.holds:
        height, width = (job.pixels * length for length in job.end)
        raise ValueError(
            f"the frames are {height} x {width} (H x W), too large for a tensor on "
            f"{job.device.type}; expected smaller ones, or another device"
        )


def empty_limit(job: StreamJob) -> int:
    """Return the memory that a plan of `job` may take on a device that nothing else uses."""
    return int(total_bytes(job.device) * job.shares[0])


def smaller_plan(job: StreamJob, plan: Plan) -> Plan | None:
    """Return the next smaller plan for `job` after `plan` ran out of memory, or None."""
    free = int(free_bytes(job.device) * job.shares[0])
    for share in (0.75, 0.5, 0.25, 0.0):
        other = make_plan(job, min(free, int(plan.peak_bytes * share)))
        if other.peak_bytes < plan.peak_bytes:
            return other
    return None


def make_bands(
    job: StreamJob,
    devices: Mapping[int, Place],
    first: int,
    tile: Size | None = None,
    chunk: int | None = None,
) -> Bands | None:
    """Return the bands of a stream with the fewest products of the slowest device.

    Args:
        job: The stream, on the first device.
        devices: What they have, by number, in the order of their bands.
        first: The number of the first device.
        tile: Height and width of tiles in pixels of the images; None: chosen by memory.
        chunk: Latents per step; None: chosen for the first device.

    Returns:
        The bands; None: there is no cut, or only the first device would have a band.
    """
    shares = {number: place.share for number, place in devices.items()}
    cuts = itertools.product(band_cuts(job.network), range(2))
    found = [divide(job, *each, shares, first) for each in cuts]
    found = [each for each in found if len(each.spans) > 1]
    if not found:
        return None
    best = min(found, key=lambda each: each.time)
    made: dict[int, Band] = {}
    plans: list[Plan] = []
    output = job.sizes[best.cut] if job.encodes else job.end
    down = job.end[best.axis] // best.length
    # The first device chooses the length of the steps.
    for number in sorted(best.spans, key=lambda number: number != first):
        place, spans = devices[number], [(0, output[0]), (0, output[1])]
        spans[best.axis] = best.spans[number]
        height, width = (down * (stop - start) for start, stop in spans)
        band = Tiles(best.cut, (height, width), (spans[0], spans[1]))
        there = replace(job, device=place.device)
        plan = make_plan(there, place.limit_bytes, tile=tile, chunk=chunk, band=band)
        tiles = plan.tiles or band
        size = plan.part_bytes, plan.peak_bytes, plan.parked
        made[number] = Band(
            number, place.name, place.device, tiles, *size, len(places(there, tiles))
        )
        chunk = chunk or plan.chunk
        plans.append(plan)
    return Bands(
        best.axis,
        chunk or 1,
        tuple(made[number] for number in best.spans),
        job.pixels * (down if job.encodes else 1),
        all(plan.holds for plan in plans),
    )


def plan_of(job: StreamJob, bands: Bands) -> Plan:
    """Return the plan of `job`, on the first device, in `bands`."""
    own = [band for band in bands.members if band.device == job.device]
    peak = sum(band.peak_bytes for band in own)
    return Plan(
        bands.chunk, own[0].part_bytes, peak, pixels=job.pixels, holds=bands.holds, bands=bands
    )


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
