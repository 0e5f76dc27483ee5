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


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    wait = getattr(getattr(torch, device.type, None), "synchronize", None)
    if device.type == "mps" and wait is not None:
        wait()
    elif device.type != "cpu" and wait is not None:
        wait(device)


def seconds(
    calls: Mapping[_Name, Callable[[], Any]],
    device: torch.device,
    *,
    launches: bool,
    repeats: int = _CALLS,
) -> dict[_Name, float]:
    """Time calls in turn, each warmed up before.

    Args:
        calls: What to time, by name.
        device: Where they run.
        launches: Count the time that the CPU takes to start them too, as in a stream of small
            calls. Else, on CUDA, they are queued first and the GPU's own time is taken.
        repeats: Calls that are timed together; 1 for those of many milliseconds.

    Returns:
        Seconds for each, the median of the rounds.
    """
    for call in calls.values():
        call()
    once = _queued if device.type == "cuda" and not launches else _wall
    rounds = [
        {name: once(call, device, repeats) for name, call in calls.items()} for _ in range(_ROUNDS)
    ]
    return {name: statistics.median(each[name] for each in rounds) for name in calls}


def _queued(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def _wall(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats
