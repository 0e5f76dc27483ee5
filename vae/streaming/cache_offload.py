"""Tails of tiles on the host, fetched one tile ahead of the computation.

Copies use pinned memory and a stream for each direction, so the device computes one tile while the
tails of the next one arrive and those of the last one leave.
"""

import contextlib

import torch
from torch import Tensor, nn

from ..layers.temporal_cache import TemporalCache
from ..pinned_memory import PinnedMemory


class Parking:
    """The memory on the host for the tails of some caches."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._inward = torch.cuda.Stream(device) if on_gpu else None
        self._outward = torch.cuda.Stream(device) if on_gpu else None
        self._memory = PinnedMemory(pinned=on_gpu)
        self._places: dict[tuple[TemporalCache, nn.Module], Tensor] = {}
        self._coming: dict[TemporalCache, torch.cuda.Event] = {}
        self._gone: dict[TemporalCache, torch.cuda.Event] = {}

    def fetch(self, cache: TemporalCache) -> None:
        """Start to copy the tails of `cache` to the device, after those were copied to the host."""
        if self._inward is not None and cache in self._gone:
            self._inward.wait_event(self._gone[cache])
        with _on(self._inward):
            for conv, tail in cache.tails.items():
                cache.tails[conv] = tail.to(self._device, non_blocking=self._memory.pinned)
        if self._inward is not None:
            self._coming[cache] = event = torch.cuda.Event()
            event.record(self._inward)

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
        # That work waited for the tails to arrive, so their memory on the host is not read any
        # more.
        if self._outward is not None:
            self._outward.wait_stream(torch.cuda.current_stream(self._device))
        tails = cache.tails.items()
        self._memory.reserve(tail for conv, tail in tails if (cache, conv) not in self._places)
        with _on(self._outward):
            for conv, tail in tails:
                cache.tails[conv] = self._left((cache, conv), tail)
        if self._outward is not None:
            self._gone[cache] = event = torch.cuda.Event()
            event.record(self._outward)

    def _left(self, key: tuple[TemporalCache, nn.Module], tail: Tensor) -> Tensor:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._memory.like(tail)
        place.copy_(tail, non_blocking=self._memory.pinned)
        if self._outward is not None and tail.device.type == "cuda":
            tail.record_stream(self._outward)
        return place


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which copies use `stream`; None: there are no streams."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
