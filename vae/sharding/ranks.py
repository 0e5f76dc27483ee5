"""The ranks that share a video, and the operations between them, which are counted.

Every rank calls the same operations in the same order. Tensors travel as bytes, in contiguous
memory, and by the host where the connection has no access to the device.
"""

import functools
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..layers.lines import Attempt
from ..planning.parts import AXES
from .messages import Group, Messages, Store, connect

_TAG = 0x5A0D

# From the widest to the narrowest: ranks that would compute in different dtypes take the widest.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


Result = TypeVar("Result")

# What is sent to a rank, and the memory for what it sends: contiguous, on the device.
Swap = tuple[Tensor | None, Tensor | None]


def at_once(do: Callable[[], Result]) -> Result:
    """Run `do` once."""
    return do()


class Ranks:
    """The ranks that share a video.

    Args:
        device: Device of this rank.
        group: The processes; None: all of `torch.distributed`.
        axis: "rows" or "columns": what is divided; None: the longer one of each video, so that the
            shorter one is sent.

    Attributes:
        rank: Number of this process in the group.
        size: Number of ranks.
        axis: What is divided, or None.
        counts: Number of operations by name, and of bytes sent by "bytes to R" for a rank R.

    Raises:
        ValueError: There is no process group, this process is not in it, or the axis is unknown.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        axis: str | None = None,
    ) -> None:
        if axis is not None and axis not in AXES:
            raise ValueError(f"axis is {axis!r}; expected 'rows', 'columns' or None")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            raise ValueError(
                "torch.distributed has no process group; expected init_process_group before, as "
                "under torchrun"
            )
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not in the group; expected one of its ranks")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.counts: Counter[str] = Counter()
        self.axis, self._device = axis, device
        self._vote = torch.zeros((), dtype=torch.int64)
        store = _store_of(group)
        # The same number on all ranks, which all call this.
        number = store.add(f"fast_video_vae/rank {self.rank}", 1)
        listeners, self._voters = (
            connect(store, f"fast_video_vae/{name} {number}", self.rank, self.size)
            for name in ("messages", "votes")
        )
        vote = self._vote.fill_(not _reaches(group, device))
        self._voters.allreduce([vote], dist.ReduceOp.MAX).wait()
        self._data: Group = self._voters if vote else group
        self._staged = self._data is self._voters and device.type != "cpu"
        groups = [self._voters] if self._data is self._voters else [self._voters, self._data]
        self._messages = Messages(listeners, groups)

    def in_step(self, stream: Iterator[Tensor]) -> Generator[Tensor, None, None]:
        """Yield the pieces `[...]` of a `stream`, and tell the other ranks if it ends early."""
        with self._messages.one_video():
            yield from stream

    def swap(self, parts: dict[int, Swap], attempt: Attempt = at_once) -> None:
        """Send tensors to neighbours and receive some from them.

        Args:
            parts: By rank: what is sent, and the memory for what is received.
            attempt: Runs an allocation, such as `Relief.attempt`.
        """
        self.counts["exchanges"] += 1
        # Boundaries in two rounds, and the lower rank sends first, so that backends that run one
        # transfer after the other have a partner for each.
        peers = sorted(parts, key=lambda peer: (min(peer, self.rank) % 2, peer))
        steps: list[tuple[Callable[..., dist.Work], Tensor, int]] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        for peer in peers:
            sent, memory = parts[peer]
            calls = []
            if sent is not None:
                data = attempt(functools.partial(self._bytes, sent))
                calls.append((self._data.send, data, peer))
                self.counts[f"bytes to {peer}"] += data.numel()
            if memory is not None:
                data = attempt(functools.partial(self._empty_bytes, memory))
                calls.append((self._data.recv, data, peer))
                arrivals.append((memory, data))
            steps += calls if self.rank < peer else reversed(calls)

        def operate() -> None:
            for work in [do([data], peer, _TAG) for do, data, peer in steps]:
                work.wait()

        self._messages.run(operate)
        if self._staged:
            for memory, data in arrivals:
                memory.view(-1).view(torch.uint8).copy_(data)

    def gather(self, x: Tensor, sizes: Sequence[int], attempt: Attempt = at_once) -> list[Tensor]:
        """Return the tensors of all ranks.

        Args:
            x: `[N, ...]` of this rank, contiguous, on the device.
            sizes: `N` of each rank.
            attempt: Runs an allocation, such as `Relief.attempt`.

        Returns:
            `[N, ...]` of each rank.
        """
        self.counts["gathers"] += 1
        # All of one size, which every backend takes.
        shape = max(sizes), *x.shape[1:]

        def block() -> Tensor:
            if len(x) == shape[0]:
                return self._bytes(x)
            padded = x.new_zeros(shape)
            padded[: len(x)] = x
            return self._bytes(padded)

        data = attempt(block)
        parts = attempt(lambda: data.new_empty(self.size, data.numel()).unbind(0))
        self._messages.run(lambda: attempt(lambda: self._data.allgather([parts], [data])).wait())
        whole = [attempt(functools.partial(part.to, self._device)) for part in parts]
        return [
            part.view(x.dtype).view(shape)[:size] for part, size in zip(whole, sizes, strict=True)
        ]

    def sum(self, x: Tensor, attempt: Attempt = at_once) -> Tensor:
        """Return the sum of a tensor over all ranks.

        Args:
            x: `[...]`, contiguous, on the device.
            attempt: Runs an allocation, such as `Relief.attempt`.

        Returns:
            `[...]`.
        """
        self.counts["sums"] += 1
        device = "cpu" if self._staged else x.device
        total = attempt(lambda: x.to(device, copy=True))
        operation = dist.ReduceOp.SUM
        self._messages.run(lambda: attempt(lambda: self._data.allreduce([total], operation)).wait())
        return attempt(lambda: total.to(x.device))

    def most(self, number: int, attempt: Attempt = at_once) -> int:
        """Return the maximum of a number over all ranks; no device waits for it.

        Args:
            number: The number of this rank.
            attempt: Runs an allocation, such as `Relief.attempt`.

        Returns:
            The maximum.
        """
        self.counts["votes"] += 1
        vote = self._vote.fill_(number)
        operation = dist.ReduceOp.MAX
        self._messages.run(
            lambda: attempt(lambda: self._voters.allreduce([vote], operation)).wait()
        )
        return int(vote)

    def widest(self, dtype: torch.dtype) -> torch.dtype:
        """Return the widest of the dtypes of all ranks, of which this one has `dtype`."""
        return _DTYPES[-self.most(len(_DTYPES) - _DTYPES.index(dtype))]

    def close(self) -> None:
        """Leave the group; the others cannot go on without this rank."""
        self._messages.leave()

    def _bytes(self, x: Tensor) -> Tensor:
        """Return contiguous memory `[...]` as bytes `[N]`, on the host where that is needed."""
        data = x.view(-1).view(torch.uint8)
        return data.cpu() if self._staged else data

    def _empty_bytes(self, like: Tensor) -> Tensor:
        """Return the memory `like` `[...]` itself as bytes `[N]`, or new memory of the host."""
        data = like.view(-1).view(torch.uint8)
        return torch.empty_like(data, device="cpu") if self._staged else data


def _reaches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a group of the caller sends the memory of an accelerator as it is."""
    backends = dict(each.split(":", 1) for each in dist.get_backend_config(group).split(","))
    return device.type != "cpu" and backends.get(device.type, "gloo") != "gloo"


def _store_of(group: dist.ProcessGroup) -> Store:
    """Return the store of a group; PyTorch before 2.7 has no public function for it."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)
