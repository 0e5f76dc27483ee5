"""What a stream needs of the ranks that share it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..layers.lines import Attempt
from ..planning.job import StreamJob
from ..planning.plan import Plan, usual_limit

if TYPE_CHECKING:  # some builds of PyTorch have no `torch.distributed`
    from ..sharding.shard import ShardGroup


def shared_limit(
    shards: "ShardGroup | None", job: StreamJob, limit_bytes: int | None
) -> int | None:
    """Return the memory limit of a stream: with ranks, that of the rank that has least."""
    if shards is None:
        return limit_bytes
    if limit_bytes is None:
        limit_bytes = usual_limit(job) // shards.sharers
    return -shards.most("limit_bytes", -limit_bytes)


def check_shared(
    shards: "ShardGroup | None",
    job: StreamJob,
    plan: Plan,
    options: Mapping[str, bool],
    attempt: Attempt,
) -> None:
    """Raise a `ValueError` if a rank has another plan, batch or `options`."""
    if shards is None:
        return
    kind = {"encode": job.spec.encodes, "single_frame": job.single_frame, **options}
    plans = {"chunk": plan.chunk, "part_bytes": plan.part_bytes, "peak_bytes": plan.peak_bytes}
    shards.check_equal({"batch": job.latent_size[0], **kind, **plans}, attempt)
