"""Time whole decodes and encodes in turn: seconds, first call, and peak memory."""

import contextvars
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fast_video_vae.kernels import synchronize
from fast_video_vae.tests.benchmarks.timing import ratio

from .rows import NotRun, Results, Values
from .session import Session

ROUNDS = 3

# A shorter run has a warm-up run before it: memory that was released to the driver is allocated
# again, which takes some milliseconds.
_SHORT_S = 1.0


@dataclass
class Measured:
    """The times and peak memory of one run."""

    cold_s: float = 0.0  # the first call, with compilation, trials and searches
    seconds: list[float] = field(default_factory=list)  # by round
    # Peak above the memory before the call, including its result; None: not measured.
    peak_bytes: int | None = None
    error: Exception | None = None  # why there are no seconds

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def values(self) -> dict[str, Any]:
        """Return the values that every table has."""
        return {
            "s": self.median_s,
            "cold_s": self.cold_s,
            "rounds": len(self.seconds),
            "peak_gib": None if self.peak_bytes is None else self.peak_bytes / 2**30,
        }


def in_turn(
    session: Session,
    runs: Mapping[str, Callable[[], Any]],
    *,
    look: Callable[[str, Any], None] | None = None,
    rounds: int = ROUNDS,
    shares_memory: bool = False,
) -> dict[str, Measured]:
    """Time `runs` in turn, after a first run of each.

    PyTorch's cached memory is released before every run. There are fewer rounds than `rounds` where
    the section's budget is too short.

    Args:
        session: The device and the clock.
        runs: Functions by name.
        look: Called with the name and the result of each first run.
        rounds: Rounds after the first run.
        shares_memory: All variants are this pack's, so they may reuse each other's cached memory
            while enough is free.
    """
    results = {name: Measured() for name in runs}
    for name, run in runs.items():
        one = results[name]
        with _caught(one):
            free(session.device)
            start = time.perf_counter()
            result = run()
            synchronize(session.device)
            one.cold_s = time.perf_counter() - start
            if look is not None:
                look(name, result)
            del result
    for count in range(rounds):
        able = [name for name, one in results.items() if one.error is None]
        turn = sum(_cost(results[name], shares_memory) for name in able)
        if turn > session.clock.left():
            if count == 0:
                for name in able:
                    cold = results[name].cold_s
                    results[name].error = NotRun(
                        f"the budget allowed only a first run of {cold:.1f} s"
                    )
            break
        for name in able:
            with _caught(results[name]):
                _round(session, runs[name], results[name], shares_memory)
    return results


def outcomes(results: Mapping[str, Measured], more: Callable[[str], Values]) -> Results:
    """Yield the rows of `results`; `more` returns further values of a kind."""
    for kind, one in results.items():
        yield kind, one.error if one.error is not None else {**one.values(), **more(kind)}


def pairs(results: Mapping[str, Measured], name: str, base: str) -> float | None:
    """Return the median ratio of the seconds of `name` to those of `base`, paired by round."""
    return ratio({key: one.seconds for key, one in results.items()}, name, base)


def free(device: torch.device) -> None:
    """Release PyTorch's cached memory on `device` and reset its peak."""
    if device.type == "cuda":
        gc.collect()
        synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def thread() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yield a function that runs a call in its own thread and returns the result.

    PyTorch caches cuDNN's plan for a shape per thread, with or without a search, so searched and
    unsearched calls must not share a thread.
    """
    with ThreadPoolExecutor(1) as pool:
        yield lambda call: pool.submit(contextvars.copy_context().run, call).result()


def snr_db(actual: Tensor, expected: Tensor) -> float:
    """Return the signal-to-noise ratio of two videos `[B, C, T, H, W]` in decibels."""
    signal = noise = 0.0
    for one, other in zip(actual.unbind(2), expected.unbind(2), strict=True):
        wide = other.float()
        signal += float(wide.square().sum(dtype=torch.float64))
        noise += float((one.float() - wide).square().sum(dtype=torch.float64))
    return 10 * torch.log10(torch.tensor(signal / noise)).item() if noise else 999.0


def _round(session: Session, run: Callable[[], Any], one: Measured, shares_memory: bool) -> None:
    if not shares_memory or _is_tight(session.device):
        free(session.device)
        if _is_short(one):
            run()
    synchronize(session.device)
    before = 0
    if session.cuda:
        torch.cuda.reset_peak_memory_stats(session.device)
        before = torch.cuda.memory_allocated(session.device)
    start = time.perf_counter()
    result = run()
    synchronize(session.device)
    one.seconds.append(time.perf_counter() - start)
    del result
    if session.cuda:
        peak = torch.cuda.max_memory_allocated(session.device) - before
        one.peak_bytes = max(peak, one.peak_bytes or 0)


def _is_tight(device: torch.device) -> bool:
    """Return whether PyTorch's cached memory would make the plan choose smaller steps."""
    if device.type != "cuda":
        return False
    left, there_is = torch.cuda.mem_get_info(device)
    return left < there_is / 2


def _is_short(one: Measured) -> bool:
    return min([one.cold_s, *one.seconds]) < _SHORT_S


def _cost(one: Measured, shares_memory: bool) -> float:
    """Return the most seconds that a round takes."""
    seconds = min([one.cold_s, *one.seconds])
    return 2 * seconds if _is_short(one) and not shares_memory else seconds


@contextmanager
def _caught(one: Measured) -> Iterator[None]:
    """Record an exception as the result, without the tensors of its traceback."""
    try:
        yield
    except Exception as error:  # whatever a kernel, a driver or a peer raises
        one.error = error.with_traceback(None)
