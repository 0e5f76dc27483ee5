"""Tails of tiles on the host, fetched one tile ahead of the computation.

Copies use pinned memory and their own stream, so the device computes one tile while the tails of
the next one arrive and those of the last one leave.
"""

import contextlib

import torch
from torch import Tensor, nn

from ..layers.temporal_cache import TemporalCache


class Parking:
    """The memory on the host for the tails of some caches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._places: dict[tuple[TemporalCache, nn.Module], Tensor] = {}
        self._coming: dict[TemporalCache, torch.cuda.Event] = {}

    def fetch(self, cache: TemporalCache) -> None:
        """Start to copy the tails of `cache` to the device."""
        with self._aside():
            cache.exchange(self._arrived)
            if self._stream is not None:
                self._coming[cache] = event = torch.cuda.Event()
                event.record(self._stream)

    def wait(self, cache: TemporalCache) -> None:
        """Make the device wait for the tails of `cache`; start the copy if it has not started."""
        if cache not in self._coming:
            self.fetch(cache)
        event = self._coming.pop(cache, None)
        if event is not None:
            work = torch.cuda.current_stream(self._device)
            work.wait_event(event)
            for tail in cache.tails().values():
                tail.record_stream(work)  # it was allocated for the other stream

    def park(self, cache: TemporalCache) -> None:
        """Start to copy the tails of `cache` to the host after the queued work."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._aside():
            cache.exchange(lambda conv, tail: self._left((cache, conv), tail))

    def settle(self) -> None:
        """Wait until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def _aside(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _arrived(self, _: nn.Module, tail: Tensor) -> Tensor:
        return tail.to(self._device, non_blocking=True)

    def _left(self, key: tuple[TemporalCache, nn.Module], tail: Tensor) -> Tensor:
        place = self._places.get(key)
        if place is None:
            pinned = self._stream is not None
            place = torch.empty_like(tail, device="cpu", pin_memory=pinned)
            self._places[key] = place
        place.copy_(tail, non_blocking=True)
        if self._stream is not None and tail.device.type == "cuda":
            tail.record_stream(self._stream)
        return place
