"""How long a call takes on a device, beside others."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

_Name = TypeVar("_Name")

# Rounds, in turn, and calls in each. A round is a millisecond or so for the sizes of a trial.
_ROUNDS = 3
_CALLS = 5

# Clock cycles that a GPU idles while calls are queued behind each other: some milliseconds.
_HEAD_START = 5_000_000


def seconds(
    calls: Mapping[_Name, Callable[[], Any]], device: torch.device, *, launches: bool
) -> dict[_Name, float]:
    """Time calls in turn, each warmed up before.

    Args:
        calls: What to time, by name.
        device: Where they run.
        launches: Count the time that the CPU takes to start them too, as in a stream of small
            calls. Else, on CUDA, they are queued first and the GPU's own time is taken.

    Returns:
        Seconds for each, the median of the rounds.
    """
    for call in calls.values():
        call()
    rounds = [
        {name: _round(call, device, launches) for name, call in calls.items()}
        for _ in range(_ROUNDS)
    ]
    return {name: statistics.median(each[name] for each in rounds) for name in calls}


def _round(call: Callable[[], Any], device: torch.device, launches: bool) -> float:
    if device.type != "cuda":
        return _wall(call)
    if launches:
        torch.cuda.synchronize(device)
        return _wall(call, lambda: torch.cuda.synchronize(device))
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)
        start.record()
        for _ in range(_CALLS):
            call()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1000 / _CALLS


def _wall(call: Callable[[], Any], finish: Callable[[], None] = lambda: None) -> float:
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    finish()
    return (time.perf_counter() - start) / _CALLS
