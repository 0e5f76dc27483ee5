"""Time calls on a device in turn."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ..devices import current, runtime, synchronize

_Name = TypeVar("_Name")

# Rounds, and calls per round. A round takes about a millisecond at the sizes of a probe.
_ROUNDS = 3
_CALLS = 5

# Clock cycles that the GPU waits while the calls are queued: some milliseconds.
_HEAD_START = 5_000_000

# Types of devices whose events have times in every supported PyTorch.
_TIMED = ("cuda", "xpu")


def seconds(
    calls: Mapping[_Name, Callable[[], Any]],
    device: torch.device,
    *,
    launches: bool,
    repeats: int = _CALLS,
    rounds: int = _ROUNDS,
    limit_s: float = math.inf,
) -> dict[_Name, float]:
    """Time calls in turn after a warm-up of each.

    Args:
        calls: Functions by name.
        device: Device that they run on.
        launches: Include the CPU time of launching, as in a stream of small calls. Otherwise, on
            devices with events, only the time of the GPU is measured.
        repeats: Calls per round; 1 for calls of many milliseconds.
        rounds: Most rounds; in each all calls have their turn.
        limit_s: Seconds after the warm-up from which no further round begins.

    Returns:
        Median seconds of a call by name.
    """
    for call in calls.values():
        call()
    once = _queued if device.type in _TIMED and not launches else _wall
    taken: list[dict[_Name, float]] = []
    end = time.perf_counter() + limit_s
    while not taken or (len(taken) < rounds and time.perf_counter() < end):
        taken.append({name: once(call, device, repeats) for name, call in calls.items()})
    return {name: statistics.median(each[name] for each in taken) for name in calls}


def _queued(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    module = runtime(device)
    with current(device):
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        # Calls are queued while the GPU waits, where it can wait.
        getattr(module, "_sleep", _skip)(_HEAD_START)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def _skip(_: int) -> None:
    """Do nothing."""


def _wall(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats
