"""Measurement of VAEs on the same weights and input: seconds, memory, difference of the results.

They run in the order A B, then B A, so that heat and other load affect all equally. A warm-up, in
which kernels are selected and results compared, is not counted.

PyTorch counts the peak memory of a GPU. On a CPU a thread samples the memory of the process.
"""

import contextlib
import gc
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ...kernels import (
    device_name,
    is_out_of_memory,
    processor,
    release_cached,
    runtime,
    synchronize,
)
from ..planning.device_memory import trim_heap
from .report import DECODE, Comparison, Result, finite

_Made = TypeVar("_Made")

# Seconds between two samples. A shorter peak is small: memory is first touched at a few GB/s.
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Contestant:
    """An implementation; a decode returns images `[..., T, H, W, C]` in [0, 1]."""

    name: str
    run: Callable[[], Tensor]
    prepare: Callable[[], None] = lambda: None  # called before each run, not counted


def compare(
    task: str,
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    dtype: str,
    device: torch.device,
    passed: Callable[[], None] = lambda: None,
) -> Comparison:
    """Run contestants on the same work in turn; the first is the baseline of the others.

    One that runs out of memory is left out of later rounds.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; expected at least 1")
    results = [Result(each.name) for each in contestants]
    entries = list(zip(contestants, results, strict=True))
    first, expected = results[0], None
    for index in range(rounds + 1):  # the first is the warm-up
        for contestant, result in entries[:: -1 if index and index % 2 == 0 else 1]:
            if result.failure is None:
                made = _call(contestant, result, device, counted=index > 0)
                if index == 0 and made is not None:
                    if result is first:
                        expected = made.cpu()
                    elif expected is not None:
                        _describe(task, result, made, first.name, expected)
                del made
            passed()
        expected = None
    for result in results:
        if result.seconds:
            result.median_s, result.best_s = statistics.median(result.seconds), min(result.seconds)
        if result.median_s and first.median_s:
            result.speed = first.median_s / result.median_s
        if result.peak_bytes and first.peak_bytes:
            result.thrift = first.peak_bytes / result.peak_bytes
    return Comparison(task, dtype, results)


def measured(device: torch.device, run: Callable[[], _Made]) -> tuple[_Made, float, int | None]:
    """Call `run`; return its result, the seconds, and the peak bytes or None: not measured."""
    # Young objects of the previous call only: a full collection may take a second.
    gc.collect(1)
    if device.type == "cpu":
        trim_heap()
    synchronize(device)
    with _watched(device) as peak_bytes:
        start = time.perf_counter()
        made = run()
        synchronize(device)
        seconds = time.perf_counter() - start
    return made, seconds, peak_bytes()


def psnr(images: Tensor, expected: Tensor) -> float:
    """Compute the PSNR of `[..., T, H, W, C]` in [0, 1] in dB, summed in float64 per frame."""
    # On the host, because some devices lack float64; a frame at a time, without a copy of all.
    pairs = zip(images.flatten(0, -4), expected.flatten(0, -4), strict=True)
    squares = ((one.cpu().double() - other.cpu().double()).square_() for one, other in pairs)
    error = sum(float(each.sum()) for each in squares)
    if error == 0:
        return math.inf
    return math.nan if not math.isfinite(error) else 10 * math.log10(images.numel() / error)


def relative_error(latent: Tensor, expected: Tensor) -> float:
    """Return the norm of `latent - expected` over that of `expected`, both `[...]`, in float64."""
    one, other = latent.cpu().double(), expected.cpu().double()
    norm, difference = float(other.norm()), float((one - other).norm())
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def device_label(device: torch.device) -> str:
    """Return the name of `device`: "NVIDIA H200", or that of the CPU with its thread count."""
    if device.type != "cpu":
        return device_name(device)
    threads = torch.get_num_threads()
    return f"{processor() or 'CPU'}, {threads} thread{'' if threads == 1 else 's'}"


def _call(
    contestant: Contestant, result: Result, device: torch.device, *, counted: bool
) -> Tensor | None:
    """Run a contestant once, and add a counted cost to its result; None: memory ran out."""
    try:
        contestant.prepare()
        made, seconds, peak_bytes = measured(device, contestant.run)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    else:
        if counted:
            result.seconds.append(seconds)
            if peak_bytes is not None:
                result.peak_bytes = max(result.peak_bytes or 0, peak_bytes)
        return made
    # Outside of the handler, which keeps the error and its tensors alive.
    result.seconds, result.peak_bytes, result.failure = [], None, "out of memory"
    release_cached(device)
    return None


def _describe(task: str, result: Result, made: Tensor, first: str, expected: Tensor) -> None:
    """Note how much `made` differs from what the `first` contestant has made."""
    shapes = [list(each.shape) for each in (made, expected)]
    if made.shape != expected.shape:
        raise ValueError(f"{result.name} gives {shapes[0]}; expected {shapes[1]} as {first} does")
    if task == DECODE:
        value, none, words = psnr(made, expected), math.inf, "PSNR {:.1f} dB"
        result.psnr_db = finite(value)
    else:
        value, none, words = relative_error(made, expected), 0, "relative error {:.1e}"
        result.relative_error = finite(value)
    result.identical = value == none
    result.agreement = "identical" if result.identical else words.format(value)
    if math.isnan(value):
        result.agreement = "not finite"


@contextlib.contextmanager
def _watched(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Watch memory in the block; a call of the result returns the most bytes above the start."""
    if device.type != "cpu":
        module = runtime(device)
        if known := hasattr(module, "max_memory_allocated"):
            module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device) if known else 0
        yield lambda: module.max_memory_allocated(device) - before if known else None
        return
    try:
        import psutil  # noqa: PLC0415, optional
    except ImportError:
        yield lambda: None
        return
    process, done = psutil.Process(), threading.Event()
    first = highest = process.memory_info().rss

    def look() -> None:
        nonlocal highest
        while not done.wait(_LOOK_SECONDS):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=look, name="fast-video-vae-memory", daemon=True)
    thread.start()
    try:
        yield lambda: max(highest, process.memory_info().rss) - first
    finally:
        done.set()
        thread.join()
