"""The plan of a stream: the length of its steps, its tiles, and the place of its caches.

Of the plans that fit into the memory, the one with the fewest predicted seconds is chosen. They are
those of the products, of the bytes that the device moves, of the launches, and of copies of caches
that wait on the host. These are copied once per chunk (8 GB for 720 x 1280 and Wan 2.1), so chunks
are longer then.
"""

from dataclasses import dataclass

from ..models.receptive_field import Size
from .bands import Bands
from .candidates import Candidates, StepChoice, kept_candidates
from .device_memory import free_bytes, total_bytes
from .job import StreamJob
from .ledger import TOO_MUCH_BYTES
from .tiling import Tiles


@dataclass(frozen=True)
class Plan:
    """The plan of one stream."""

    chunk: int  # latents per step; -1: all
    part_bytes: int  # an activation above this size is divided in time
    peak_bytes: int  # estimated, without weights, input and output
    tiles: Tiles | None = None  # None: whole frames
    parked: bool = False  # tails of a tile are on the host while it does not run
    pixels: int = 1  # of an image per pixel of the network's frames
    latent_s: float = 0.0  # predicted seconds per latent
    holds: bool = True  # the device holds every tensor; otherwise no plan of the stream does
    bands: Bands | None = None  # `peak_bytes` is then that of the first device; None: one device

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


def make_plan(
    job: StreamJob,
    limit_bytes: int | None = None,
    *,
    chunk: int | None = None,
    tile: Size | None = None,
    cuts: bool = True,
) -> Plan:
    """Return the fastest plan within a limit, or the smallest one; no limit: see `_SHARES`."""
    candidates = kept_candidates(job, tile if cuts else None, chunk, cuts=cuts)
    if limit_bytes is None:
        choice = _within_free(candidates, job)
    else:
        choice = candidates.fastest(limit_bytes)
    choice = choice or candidates.smallest
    too_large, peak_bytes = divmod(choice.peak_bytes, TOO_MUCH_BYTES)
    return Plan(
        chunk or choice.chunk,
        choice.part_bytes,
        peak_bytes,
        choice.tiles,
        choice.parked,
        job.pixels,
        choice.seconds,
        holds=not too_large,
    )


def plan_of(job: StreamJob, bands: Bands) -> Plan:
    """Return the plan of `job`, on the first device, in `bands`."""
    own = [band for band in bands.members if band.device == job.device]
    return Plan(
        bands.chunk,
        own[0].part_bytes,
        sum(band.peak_bytes for band in own),
        pixels=job.pixels,
        latent_s=bands.latent_s,
        holds=bands.holds,
        bands=bands,
    )


def _within_free(candidates: Candidates, job: StreamJob) -> StepChoice | None:
    """Return the fastest choice within the free memory, or None."""
    free = free_bytes(job.device)
    usual, most = (int(free * share) for share in job.shares)
    choice = candidates.fastest(usual)
    if choice is not None and choice.tiles is None:
        return choice
    found = [each for each in (choice, candidates.fastest(most, parks=False)) if each is not None]
    return min(found, key=lambda each: each.seconds, default=candidates.fastest(most))


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
