"""How the processes of a group of `torch.distributed` become the ranks of a video.

Gloo groups are created for votes, messages and data, from the store of the caller's group: one of
`torch.distributed.new_group` would need the processes outside of it too. Between GPUs that the
caller's group links, data takes that group. Votes have a group of their own, because gloo ends a
process whose operation meets one of another size, as that of a rank that is at its next video.
"""

import datetime
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..planning.parts import AXES
from .messages import Group, Messages, ShardError
from .shard import ShardGroup

# Seconds for all ranks to come; one can need longer than another to load its weights.
WAIT_S = 300.0

# The ranks wait for the slowest of them; `Messages` ends the wait for one that is gone.
_TIMEOUT = datetime.timedelta(days=7)


def connected(
    device: torch.device, group: dist.ProcessGroup | None = None, axis: str | None = None
) -> ShardGroup:
    """Connect the processes of `group` (None: all), which call this within `WAIT_S`."""
    unknown = None
    if axis is not None and axis not in AXES:
        unknown = ValueError(f"axis is {axis!r}; expected 'rows', 'columns' or None")
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        raise unknown or ValueError(
            "torch.distributed has no process group; expected init_process_group before, as under "
            "torchrun"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is not in the group; expected one of its ranks")
    c10d: Any = dist.distributed_c10d
    # PyTorch before 2.7 has no public function for the store.
    public = hasattr(group, "get_group_store")
    store = group.get_group_store() if public else c10d._get_process_group_store(group)
    # The same number on all ranks.
    number = store.add(f"fast_video_vae/rank {rank}", 1)
    places = [f"fast_video_vae/place {number} of {each}" for each in range(size)]
    store.set(places[rank], _place(device) if unknown is None else "")
    _wait_for(size, lambda each: store.check([places[each]]))
    if unknown is not None:
        raise unknown
    found = [store.get(each).decode() for each in places]
    if "" in found:
        wrong = found.index("")
        raise ValueError(f"rank {wrong} has an unknown axis; expected 'rows', 'columns' or None")

    def linked(name: str) -> Group:
        own = c10d.PrefixStore(f"fast_video_vae/{name} {number}", store)
        return c10d.ProcessGroupGloo(own, rank, size, _TIMEOUT)

    listeners, voters = linked("messages"), linked("votes")
    vote = torch.tensor(not _reaches(group, device), dtype=torch.int64)
    voters.allreduce([vote], dist.ReduceOp.MAX).wait()
    data: Group = linked("data") if vote else group
    messages = Messages(listeners, [voters, data])
    return ShardGroup(device, axis, voters, data, messages, found.count(found[rank]))


def _wait_for(size: int, is_there: Callable[[int], bool]) -> None:
    end = time.monotonic() + WAIT_S
    for rank in range(size):
        while not is_there(rank):
            if time.monotonic() > end:
                raise ShardError(
                    f"rank {rank} of {size} did not come within {WAIT_S:g} s; expected the same "
                    "call on all ranks"
                )
            time.sleep(0.01)


def _place(device: torch.device) -> str:
    """Return a name of `device` that differs between machines and between GPUs."""
    unit = str(device)
    if device.type == "cuda":
        unit = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    return f"{socket.gethostname()} {unit}"


def _reaches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a group sends the memory of an accelerator as it is."""
    backends = dict(each.split(":", 1) for each in dist.get_backend_config(group).split(","))
    return device.type != "cpu" and backends.get(device.type, "gloo") != "gloo"
