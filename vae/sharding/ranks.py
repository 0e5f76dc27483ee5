"""The ranks that share a video, and the operations between them, which are counted.

Every rank calls the same operations in the same order. Tensors travel as bytes, in contiguous
memory, and by the host where the connection has no access to the device.
"""

import contextlib
import weakref
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .messages import Group, Messages

_TAG = 0x5A0D

# Numbers that one vote compares, with the place of the operation and what they are.
_MOST_NUMBERS = 16

# From the widest to the narrowest: ranks that would compute in different dtypes take the widest.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# What is sent to a rank, and the memory for what it sends: contiguous, on the device.
Swap = tuple[Tensor | None, Tensor | None]


class Ranks:
    """The ranks that share a video; `sharers` of them have the same device."""

    def __init__(
        self,
        device: torch.device,
        axis: str | None,
        voters: Group,
        data: Group,
        messages: Messages,
        sharers: int = 1,
    ) -> None:
        self.rank, self.size = voters.rank(), voters.size()
        self.axis, self.sharers = axis, sharers
        self.counts: Counter[str] = Counter()
        self.device = device
        self._voters, self._data, self._messages = voters, data, messages
        by_host = not isinstance(data, dist.ProcessGroup)
        self._staged = by_host and device.type not in ("cpu", "meta")
        # The memory of a vote exists from the start: a shortage of memory is one reason for it.
        self._numbers = array("q", bytes(8 * 2 * _MOST_NUMBERS))
        with torch.inference_mode(False):
            self._vote = torch.frombuffer(self._numbers, dtype=torch.int64)
        weakref.finalize(self, messages.leave)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Copy and pickle as None: a copy of a VAE has no ranks."""
        return type(None), ()

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error notifies the other ranks, before a video runs."""
        return self._messages.preparing()

    def in_step(self, stream: Iterator[Tensor]) -> Generator[Tensor, None, None]:
        """Yield the pieces `[...]` of a `stream`, and notify the other ranks if it ends early."""
        with self._messages.one_video():
            yield from stream

    def swap(self, parts: dict[int, Swap]) -> None:
        """Send tensors to neighbours and receive some from them."""
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
                data = self._bytes(sent)
                calls.append((self._data.send, data, peer))
                self.counts[f"bytes to {peer}"] += data.numel()
            if memory is not None:
                data = self._empty_bytes(memory)
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

    def gather(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the contiguous `x` `[N, ...]` of all ranks, whose `N` are `sizes`."""
        self.counts["gathers"] += 1
        if isinstance(self._data, dist.ProcessGroup):
            return self._gathered(x, sizes, self._data)
        own = self._bytes(x)
        row_bytes = own.numel() // len(x)
        parts = [
            own if rank == self.rank else own.new_empty(size * row_bytes)
            for rank, size in enumerate(sizes)
        ]

        def operate() -> None:
            others = [rank for rank in range(self.size) if rank != self.rank]
            works = [self._data.send([own], rank, _TAG) for rank in others]
            works += [self._data.recv([parts[rank]], rank, _TAG) for rank in others]
            for work in works:
                work.wait()

        self._messages.run(operate)
        return [part.to(self.device).view(x.dtype).view(-1, *x.shape[1:]) for part in parts]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the contiguous `x` `[...]` over all ranks."""
        self.counts["sums"] += 1
        total = x.to("cpu" if self._staged else x.device, copy=True)
        operation = dist.ReduceOp.SUM
        self._messages.run(lambda: self._data.allreduce([total], operation).wait())
        return total.to(x.device)

    def most(self, name: str, number: int) -> int:
        """Return the maximum of a number over all ranks; no device waits for it."""
        _, (most,) = self._extremes(name, [number])
        return most

    def check_equal(self, numbers: dict[str, int]) -> None:
        """Raise a `ValueError` if a rank has other numbers, by name."""
        least, most = self._extremes(" ".join(numbers), [*numbers.values()])
        for (name, number), low, high in zip(numbers.items(), least, most, strict=True):
            if high != low:
                raise ValueError(
                    f"{name} is {int(number)} on this rank, and {low} to {high} on all; expected "
                    "one number"
                )

    def _extremes(self, names: str, numbers: list[int]) -> tuple[list[int], list[int]]:
        """Return the minimum and the maximum of each number over all ranks."""
        # All votes have one size, because gloo ends the process if those of two ranks differ.
        self.counts["votes"] += 1
        place = self._messages.place
        given = [*place, zlib.crc32(names.encode()), *numbers]
        given += [0] * (_MOST_NUMBERS - len(given))
        self._numbers[:] = array("q", [*given, *(-number for number in given)])
        vote, operation = self._vote, dist.ReduceOp.MAX
        self._messages.run(lambda: self._voters.allreduce([vote], operation).wait())
        most = [*self._numbers[:_MOST_NUMBERS]]
        least = [-number for number in self._numbers[_MOST_NUMBERS:]]
        if most[:2] != least[:2]:
            self._messages.lose_step(is_ahead=place[0] > least[0])
        if most[2] != least[2]:
            raise ValueError(
                f"this rank compares {names}, and another one something else; expected the same "
                "calls on all ranks"
            )
        return least[3 : 3 + len(numbers)], most[3 : 3 + len(numbers)]

    def widest(self, dtype: torch.dtype) -> torch.dtype:
        """Return the widest of the dtypes of all ranks, of which this one has `dtype`."""
        return _DTYPES[-self.most("dtype", len(_DTYPES) - _DTYPES.index(dtype))]

    def close(self) -> None:
        """Leave the group; the others cannot go on without this rank."""
        self._messages.leave()

    def _gathered(self, x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
        """Return `gather(x, sizes)` by one operation of the backend, in blocks of one size."""
        most, own = max(sizes), x
        if len(x) < most:
            own = x.new_zeros(most, *x.shape[1:])
            own[: len(x)] = x
        whole = x.new_empty(self.size, *own.shape)
        self._messages.run(lambda: dist.all_gather_into_tensor(whole, own, group=group))
        return [part[:size] for part, size in zip(whole, sizes, strict=True)]

    def _bytes(self, x: Tensor) -> Tensor:
        """Return contiguous memory `[...]` as bytes `[N]`, on the host where that is needed."""
        data = x.view(-1).view(torch.uint8)
        return data.cpu() if self._staged else data

    def _empty_bytes(self, like: Tensor) -> Tensor:
        """Return the memory `like` `[...]` itself as bytes `[N]`, or new memory of the host."""
        data = like.view(-1).view(torch.uint8)
        return torch.empty_like(data, device="cpu") if self._staged else data
