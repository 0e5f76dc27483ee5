"""The plan of a stream and its executor: whole frames, tiles, or bands on several devices."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kernels import Snapshot
from ..layers.oom import Relief
from ..layers.temporal_cache import TemporalCache
from ..models.replicas import Replicas
from ..planning.bands import BandPlanner
from ..planning.job import StreamJob
from ..planning.plan import Plan, cut_tiles, plan_of
from .bands.banded_executor import BandedDecode, BandedEncode, reach_of
from .bands.banded_work import BandedWork
from .bands.crew import Crew
from .cache_offload import Parking
from .executor import Executor
from .options import StreamOptions
from .output import Output
from .precision import check_computes
from .tiled_executor import TiledDecode, TiledEncode


@dataclass(frozen=True)
class Team:
    """The devices that can share a video, and copies of the networks there."""

    replicas: Replicas
    crew: Crew = field(default_factory=Crew)

    def of_video(self) -> "Team":
        """Return the team of a video, whose devices stay when others are chosen."""
        return Team(self.replicas, self.crew.of_video())

    def plan(self, job: StreamJob, options: StreamOptions) -> tuple[Plan, BandPlanner] | None:
        """Return the plan of a stream in bands and their planner; None: one device computes it."""
        devices = self.crew.members(job.device)
        if not devices:
            return None
        for device in devices.values():
            check_computes(job.dtype, device)
        first = next(number for number, device in devices.items() if device == job.device)
        limit, tile, chunk = options.limit_bytes, options.tile, options.chunk
        planner = BandPlanner(job, devices, first, limit, tile, chunk)
        bands = planner.plan(self.crew.speeds((job.spec.encodes, job.dtype)))
        return None if bands is None else (plan_of(job, bands), planner)


def make_executor(
    job: StreamJob,
    plan: Plan,
    new_cache: Callable[[], TemporalCache],
    leave: Callable[[Tensor], Tensor] | Output,
) -> Executor:
    """Return the executor of a plan for one device; `leave` takes the output of the layers."""
    if plan.tiles is None:
        executor = Executor(job.network.chains(), new_cache(), plan.part_bytes)
        executor.finish = _finishing(leave, executor.cache)
        return executor
    parts = *cut_tiles(job, plan.tiles), new_cache, plan.part_bytes
    if isinstance(leave, Output):
        executor = TiledDecode(*parts)
        executor.output = leave
    else:
        executor = TiledEncode(*parts)
        executor.finish = leave
    if plan.parked:
        executor.parking = Parking(job.device)
    return executor


def make_banded(
    team: Team,
    planner: BandPlanner,
    plan: Plan,
    new_cache: Callable[[], TemporalCache],
    leave: Callable[[Tensor], Tensor] | Output,
    relief: Relief,
    release: Callable[[torch.device], None] | None,
    *,
    known: bool,
    kernels: Callable[[torch.device], Snapshot],
) -> Executor:
    """Return the executor of a plan for several devices."""
    bands = plan.bands
    if bands is None:
        raise ValueError("the plan has no bands; expected those of several devices")
    output = leave if isinstance(leave, Output) else None
    made = team.crew, team.replicas, relief, release, known, output
    work = BandedWork(planner, *made, kernels)
    parts = work, bands, new_cache(), reach_of(planner, bands)
    if isinstance(leave, Output):
        return BandedDecode(*parts)
    executor = BandedEncode(*parts)
    executor.finish = leave
    return executor


def _finishing(
    leave: Callable[[Tensor], Tensor] | Output, cache: TemporalCache
) -> Callable[[Tensor], Tensor]:
    """Return what converts the output of the layers; of a shard, whole frames of all ranks."""
    shard = cache.shard
    if isinstance(leave, Output):
        if shard is None:
            return leave.write
        return lambda x: leave.write(shard.gather(x, cache.attempt))
    if shard is None:
        return leave
    return lambda x: shard.gather(leave(x), cache.attempt)
