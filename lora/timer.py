"""How long the parts of a LoRA take in a run, without waiting for the device meanwhile."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Timer:
    """Adds up seconds by kind of work.

    On a GPU events are recorded, which the device passes when it comes to them; they are read when
    `seconds` is asked for.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def of(self, kind: str, device: torch.device) -> Iterator[None]:
        """Time what is done inside.

        Args:
            kind: Of the work.
            device: Where it is done.
        """
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds[kind] += time.perf_counter() - start
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((kind, first, last))

    def seconds(self) -> dict[str, float]:
        """By kind, since the last time this was asked."""
        for kind, first, last in self._events:
            last.synchronize()
            self._seconds[kind] += first.elapsed_time(last) / 1e3
        result = dict(self._seconds)
        self._events.clear()
        self._seconds.clear()
        return result
