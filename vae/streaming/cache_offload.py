"""Tails of tiles on the host, fetched one tile ahead of the computation.

Copies use pinned memory and a stream for each direction, so the device computes one tile while the
tails of the next one arrive and those of the last one leave. Where the system refuses to pin
memory, plain memory is used, and copies block.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ..layers.temporal_cache import TemporalCache
from ..pinned_memory import pinned_memory

# A slab is at least this part of the memory before it, so that tensors of more than half of a power
# of two share later slabs.
_GROWTH = 4

# Alignment of tensors, as of PyTorch's own allocations.
_ALIGNMENT = 256


class HostMemory:
    """Memory for some tensors, in slabs of powers of two, to which PyTorch rounds pinned ones."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned  # All memory so far is pinned
        self._held = 0
        self._free: list[Tensor] = []  # The ends of the slabs

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Make room for `tensors`, each `[...]`, which share slabs then."""
        wanted = sum(map(_taken, tensors))
        if wanted > sum(map(len, self._free)):
            self._add(wanted)

    def _add(self, nbytes: int) -> None:
        """Allocate a slab of at least `nbytes`."""
        size = 1 << (max(nbytes, self._held // _GROWTH, 1) - 1).bit_length()
        memory = pinned_memory(size) if self.pinned else None
        self.pinned = memory is not None
        self._free.append(torch.empty(size, dtype=torch.uint8) if memory is None else memory)
        self._held += size

    def like(self, x: Tensor) -> Tensor:
        """Return uninitialised memory on the host with the shape, strides and dtype of `x`."""
        taken = _taken(x)
        if not any(taken <= len(each) for each in self._free):
            self._add(taken)
        slab = next(at for at, each in enumerate(self._free) if taken <= len(each))
        flat = self._free[slab][: x.nbytes].view(x.dtype)
        self._free[slab] = self._free[slab][taken:]
        return flat.as_strided(x.shape, torch.empty_like(x, device="meta").stride())


def _taken(x: Tensor) -> int:
    """Return the bytes of `x` `[...]` with its alignment."""
    return -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT


class Parking:
    """The memory on the host for the tails of some caches."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._inward = torch.cuda.Stream(device) if on_gpu else None
        self._outward = torch.cuda.Stream(device) if on_gpu else None
        self._memory = HostMemory(pinned=on_gpu)
        self._places: dict[tuple[TemporalCache, nn.Module], Tensor] = {}
        self._coming: dict[TemporalCache, torch.cuda.Event] = {}
        self._gone: dict[TemporalCache, torch.cuda.Event] = {}

    def fetch(self, cache: TemporalCache) -> None:
        """Start to copy the tails of `cache` to the device, after those were copied to the host."""
        if self._inward is not None and cache in self._gone:
            self._inward.wait_event(self._gone[cache])
        with _on(self._inward, self._coming, cache):
            for conv, tail in cache.tails.items():
                cache.tails[conv] = tail.to(self._device, non_blocking=self._memory.pinned)

    def wait(self, cache: TemporalCache) -> None:
        """Make the device wait for the tails of `cache`; start the copy if it has not started."""
        if cache not in self._coming:
            self.fetch(cache)
        event = self._coming.pop(cache, None)
        if event is not None:
            work = torch.cuda.current_stream(self._device)
            work.wait_event(event)
            for tail in cache.tails.values():
                tail.record_stream(work)  # it was allocated for the other stream

    def park(self, cache: TemporalCache) -> None:
        """Start to copy the tails of `cache` to the host after the queued work."""
        # That work waited for the tails to arrive, so their memory on the host is free.
        if self._outward is not None:
            self._outward.wait_stream(torch.cuda.current_stream(self._device))
        places, tails = self._places, cache.tails.items()
        self._memory.reserve(tail for conv, tail in tails if (cache, conv) not in places)
        with _on(self._outward, self._gone, cache):
            for conv, tail in tails:
                place = places.get((cache, conv))
                if place is None:
                    place = places[cache, conv] = self._memory.like(tail)
                place.copy_(tail, non_blocking=self._memory.pinned)
                if self._outward is not None and tail.device.type == "cuda":
                    tail.record_stream(self._outward)
                cache.tails[conv] = place


@contextlib.contextmanager
def _on(
    stream: torch.cuda.Stream | None,
    events: dict[TemporalCache, torch.cuda.Event],
    cache: TemporalCache,
) -> Iterator[None]:
    """Let copies in the block use `stream`, and note the event after them; None: do nothing."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield
    events[cache] = event = torch.cuda.Event()
    event.record(stream)
