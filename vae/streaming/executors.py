"""The executor of a plan: whole frames, tiles, or bands on several devices."""

from collections.abc import Callable

from torch import Tensor

from ..layers.temporal_cache import TemporalCache
from ..planning.bands import Bands
from ..planning.job import StreamJob
from ..planning.plan import Plan, cut_tiles
from .bands.banded_executor import BandedDecode, BandedEncode
from .bands.crew import BandedWork
from .cache_offload import Parking
from .executor import Executor
from .output import Output
from .tiled_executor import TiledDecode, TiledEncode


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
    work: BandedWork,
    bands: Bands,
    cache: TemporalCache,
    leave: Callable[[Tensor], Tensor] | Output,
) -> Executor:
    """Return the executor of bands on several devices; `leave` takes the output of the layers."""
    if isinstance(leave, Output):
        return BandedDecode(work, bands, cache)
    executor = BandedEncode(work, bands, cache)
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
