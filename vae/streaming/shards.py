"""What a stream needs of the ranks that share it."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ..layers.lines import Attempt, FrameShard
from ..planning.job import StreamJob
from ..planning.plan import Plan, usual_limit


class StreamShards(Protocol):
    """The ranks that share a video; see `sharding.shard.ShardGroup`."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        ...

    @property
    def sharers(self) -> int:
        """Ranks that have the same device, this one included."""
        ...

    def split(self, height: int, width: int, attempt: Attempt = ...) -> FrameShard:
        """Return the part of latents of `height` and `width`; `attempt` runs an allocation."""
        ...

    def most(self, name: str, number: int, attempt: Attempt = ...) -> int:
        """Return the maximum of `number`, called `name` on all ranks; `attempt` allocates."""
        ...

    def check_equal(self, numbers: dict[str, int], attempt: Attempt = ...) -> None:
        """Raise a ValueError if a rank has other `numbers`; `attempt` runs an allocation."""
        ...

    def preparing(self) -> AbstractContextManager[None]:
        """Return a context in which an error notifies the other ranks, before a video runs."""
        ...

    def in_step(self, stream: Iterator[Tensor]) -> Generator[Tensor, None, None]:
        """Yield the pieces `[...]` of a `stream`, and notify the other ranks if it ends early."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...

    def widest(self, dtype: torch.dtype) -> torch.dtype:
        """Return the widest `dtype` of all ranks."""
        ...


def shared_limit(
    shards: StreamShards | None, job: StreamJob, limit_bytes: int | None
) -> int | None:
    """Return the memory limit of a stream: with ranks, that of the rank that has least."""
    if shards is None:
        return limit_bytes
    if limit_bytes is None:
        limit_bytes = usual_limit(job) // shards.sharers
    return -shards.most("limit_bytes", -limit_bytes)


def check_shared(
    shards: StreamShards | None,
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
