"""The executor of a plan: whole frames or tiles, of an encoder or a decoder."""

from collections.abc import Callable

from torch import Tensor

from ..layers.temporal_cache import TemporalCache
from ..planning.job import StreamJob
from ..planning.plan import Plan, cut_tiles
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
    """Return the executor of a plan.

    Args:
        job: The stream.
        plan: Its plan.
        new_cache: Creates the state of the video, or of a tile.
        leave: Converts the output `[B, C, T, H, W]` of an encoder; or the destination of a
            decoder's frames.

    Returns:
        The executor.
    """
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
