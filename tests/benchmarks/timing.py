"""Time runs in turn and compare them."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fast_video_vae.kernels import synchronize
from fast_video_vae.tests.benchmarks import record


def best_device() -> torch.device:
    """Return the GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def in_turn(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    look: Callable[[str, Any], None] | None = None,
) -> dict[str, list[float]]:
    """Time `runs` in turn; return seconds by name, of a first round and then of `rounds` others.

    `look` gets the name and the result of each run.
    """
    device = best_device()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            gc.collect()
            synchronize(device)
            start = clock()
            result = run()
            synchronize(device)
            seconds[name].append(clock() - start)
            if look is not None:
                look(name, result)
            del result
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> float | None:
    """Return the median ratio of `seconds[name]` to `seconds[base]`, paired by round."""
    pairs = list(zip(seconds[name], seconds[base], strict=False))
    return statistics.median(one / other for one, other in pairs) if pairs else None


def append(
    path: Path,
    bench: str,
    case: str,
    seconds: Mapping[str, Sequence[float]],
    width: int,
    versions: Mapping[str, str],
) -> tuple[dict[str, float], dict[str, float]]:
    """Append a row for each implementation; return median seconds and their ratios to "ours"."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = {name: ratio(seconds, name, "ours") for name in seconds}
    for name, times in seconds.items():
        record.append(
            path,
            bench,
            case,
            base_width=width,
            implementation=name,
            version=versions[name],
            median_s=round(medians[name], 4),
            seconds=[round(value, 4) for value in times],
            ours_is_faster_by=round(ratios[name], 3),
        )
    return medians, ratios


def moved_bytes(arguments: Mapping[str, Any], result: Tensor) -> int:
    """Return the bytes that a call must move: each argument read once, the result written once."""
    # A tail is read and written. The second read of `x` for the statistics of a norm over frames is
    # not counted.
    tail = arguments.get("tail")
    tensors = [x for name, x in arguments.items() if name != "out" and isinstance(x, Tensor)]
    tensors += [result] if tail is None else [result, tail]
    return sum(x.numel() * x.element_size() for x in tensors)
