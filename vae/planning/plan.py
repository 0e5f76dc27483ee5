"""The choice of a plan: the length of steps, the tiles, and the place of the tails.

Settings are measured in a fixed order, the fastest first: whole frames and a few tiles in shorter
and shorter steps, whole frames in smaller and smaller parts, then smaller and smaller tiles, whose
tails wait on the host if they can. The first one that fits into the memory is the plan.
"""

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ...kernels import tensor_limit
from ..models.base import Network, unwrapped
from ..models.receptive_field import Size
from .bands import Band, Bands, Place, divide
from .device_memory import free_bytes, total_bytes
from .job import StreamJob
from .measured import measured
from .tiling import Tiles, band_cuts, can_cut, places

# Sizes of parts on a GPU. The first one fills it, and below the last one a part is a frame.
_PARTS = (1 << 30, 1 << 28)

# On a CPU an activation of this size stays in the last-level cache, and below the 32 MB from which
# on glibc maps every block anew, which takes about as long as the convolution that fills it.
_CPU_PARTS = (24 << 20,)

# Parts for when memory is short; a larger single frame is not divided.
_SMALL_PARTS = (1 << 26, 1 << 22)

# Latents per step. More gained nothing measurable, and delay the first frames.
_LATENTS = (3, 2, 1)

# Places of a cut into tiles whose tails wait on the host, those of the most layers in tiles.
_PARKED_CUTS = 2

# Numbers of rows and columns of tiles.
_GRIDS = ((2, 1), (4, 2), (8, 2), (8, 4), (16, 9))
_SMALLEST_TILE = 32

# Those that cost less than smaller parts of whole frames.
_FEW = slice(1, 2)

# Tiles, latents per step, bytes of a part, and whether tails wait on the host.
_Setting = tuple[Tiles | None, int, int, bool]


@dataclass(frozen=True)
class Plan:
    """The plan of one stream."""

    chunk: int  # latents per step; -1: all
    part_bytes: int  # an activation above this size is divided in time
    peak_bytes: int  # estimated, without weights, input and output
    tiles: Tiles | None = None  # None: whole frames
    parked: bool = False  # tails of a tile are on the host while it does not run
    pixels: int = 1  # of an image per pixel of the network's frames
    holds: bool = True  # the device holds every tensor; otherwise no plan of the stream does
    bands: Bands | None = None  # `peak_bytes` is then the first device's; None: one device

    @property
    def step(self) -> str:
        """The length of a step, in words."""
        return "all latents" if self.chunk == -1 else f"{self.chunk} latent{'s'[: self.chunk > 1]}"

    @property
    def frames(self) -> str:
        """The bands, or the size of the tiles (width before height), in words."""
        if self.bands is not None:
            return str(self.bands)
        if self.tiles is None:
            return "whole frames"
        height, width = (self.pixels * length for length in self.tiles.size)
        return f"tiles of {width}x{height}{', caches on the host' if self.parked else ''}"

    def __str__(self) -> str:
        if self.bands is not None:
            return f"{self.step} a step, {self.frames}"
        return f"{self.step} a step, {self.frames}, about {self.peak_bytes / 2**20:.0f} MiB"


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
        self._cuts = can_cut(job.network) if band is None else [band.cut]
        self._sizes = _tile_sizes(job, tile, band) if cuts and self._cuts else []
        self._only_tiles = band is not None or (tile is not None and bool(self._sizes))
        self._known: dict[_Setting, Plan] = {}

    def first(self, usual: int, most: int) -> Plan:
        """Return the first plan within the `usual` limit, or within `most`; or the smallest one.

        More of the memory is used only instead of tiles, or of tails on the host.
        """
        for settings in filter(None, self._groups()):
            # The last one of a group shows at once whether it is worth a look.
            if self._fits(settings[0], usual) or self._fits(settings[-1], most):
                fitting = ((each, limit) for limit in (usual, most) for each in settings)
                return next(self._plan(each) for each, limit in fitting if self._fits(each, limit))
        return min(self._known.values(), key=lambda plan: (not plan.holds, plan.peak_bytes))

    def _fits(self, setting: _Setting, limit: int) -> bool:
        plan = self._plan(setting)
        return plan.holds and plan.peak_bytes <= limit

    def _plan(self, setting: _Setting) -> Plan:
        """Return the plan of a setting, which is measured once."""
        if setting not in self._known:
            job, (tiles, chunk, part_bytes, parked) = self._job, setting
            peak, largest = measured(job, tiles, chunk, part_bytes, parked=parked)
            holds = largest <= tensor_limit(job.device, job.dtype.itemsize)
            made = chunk, part_bytes, peak, tiles, parked, job.pixels, holds
            self._known[setting] = Plan(*made)
        return self._known[setting]

    def _groups(self) -> Iterator[list[_Setting]]:
        """Yield the settings in groups; of a later one, whatever fits takes longer."""
        sizes, cuts, (latents, parts) = self._sizes, self._cuts, self._steps()
        whole, few = list[Tiles | None]([None]), list[Tiles | None]()
        if self._only_tiles:
            whole = [self._tiles(cut, sizes[0]) for cut in cuts]
        else:
            few += [self._tiles(cut, size) for size in sizes[_FEW] for cut in cuts[:2][-1:]]
        for tiles in (whole, few):
            yield [(each, count, parts[0], False) for each in tiles for count in latents]
        yield [(each, latents[-1], part, False) for each in whole for part in parts[1:]]
        # Tails are most of the memory of a video, but those of the layers before the first cut stay
        # where they are. Longer steps copy less.
        parked = self._job.parks
        count, cuts = (latents[0], cuts[-_PARKED_CUTS:]) if parked else (latents[-1], cuts)
        small = [self._tiles(cut, size) for size in sizes for cut in cuts]
        part = parts[len(parts) // 2]
        yield [
            *((each, count, part, parked) for each in small),
            *((each, latents[-1], parts[-1], parked) for each in small[-1:]),
        ]

    def _steps(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return latents per step, and sizes of parts, the largest first."""
        latents = _LATENTS
        if self._job.single_frame:
            latents = (1,)
        elif self._chunk is not None:
            latents = (self._chunk if self._chunk > 0 else _LATENTS[0],)
        parts = _CPU_PARTS if self._job.device.type == "cpu" else _PARTS
        return latents, [*parts, *(part for part in _SMALL_PARTS if part < parts[0])]

    def _tiles(self, cut: int, size: Size) -> Tiles:
        return Tiles(cut, size) if self._band is None else replace(self._band, size=size)


def make_plan(
    job: StreamJob,
    limit_bytes: int | None = None,
    *,
    chunk: int | None = None,
    tile: Size | None = None,
    cuts: bool = True,
    band: Tiles | None = None,
) -> Plan:
    """Return the first plan within a limit of a step, or the smallest one.

    None as the limit is a share of what is free. The latents of a step (`chunk`), and height and
    width of a `tile` in pixels of the images, are chosen if None. `band` is the part to plan.
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

    `job` is on the `first` of the devices, which are in the order of their bands. None is returned
    where there is no cut, or only the first device would have a band.
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
