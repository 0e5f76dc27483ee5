"""Whole decodes and encodes timed in turn: seconds, the first call apart, and peak memory."""

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

# A run that is shorter is preceded by one that does not count, because what the one before it gave
# back to the driver has to be asked for again: some milliseconds.
_SHORT_S = 1.0


@dataclass
class Measured:
    """Of one of those that take turns."""

    cold_s: float = 0.0  # the first call: whatever is compiled, tried and searched for is in it
    seconds: list[float] = field(default_factory=list)  # of each round
    # Above what was held before a call, its result included; None where nobody counts it.
    peak_bytes: int | None = None
    error: Exception | None = None  # why there are no seconds

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def values(self) -> dict[str, Any]:
        """What every table has."""
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
    """Time runs in turn, after a first one of each that does not count.

    Before every one the memory that others keep for later goes back to the device. There are
    fewer rounds where the time of the section does not allow for more.

    Args:
        look: Sees the result of each first run.
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
                    results[name].error = NotRun(f"a first run of {cold:.1f} s fitted, no more")
            break
        for name in able:
            with _caught(results[name]):
                _round(session, runs[name], results[name], shares_memory)
    return results


def outcomes(results: Mapping[str, Measured], more: Callable[[str], Values]) -> Results:
    """The rows of what `in_turn` gives: `more` is what one has beside seconds, memory, rounds."""
    for kind, one in results.items():
        yield kind, one.error if one.error is not None else {**one.values(), **more(kind)}


def pairs(results: Mapping[str, Measured], name: str, base: str) -> float | None:
    """How many times as long one took as another: the median over the rounds, each a pair."""
    return ratio({key: one.seconds for key, one in results.items()}, name, base)


def free(device: torch.device) -> None:
    """Give the device the memory back that PyTorch keeps for later, and start its peak anew."""
    if device.type == "cuda":
        gc.collect()
        synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def thread() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Lend a thread of its own: a function that runs a call there and gives its result.

    PyTorch remembers cuDNN's plan for a shape in each thread, whether it was searched for or not,
    so that what is searched for and what is not may not meet in one.
    """
    with ThreadPoolExecutor(1) as pool:
        yield lambda call: pool.submit(contextvars.copy_context().run, call).result()


def snr_db(actual: Tensor, expected: Tensor) -> float:
    """How far two videos `[B, C, T, H, W]` agree: signal over difference, in decibels."""
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
    """Whether so little is free that our steps would be shorter for what PyTorch keeps."""
    if device.type != "cuda":
        return False
    left, there_is = torch.cuda.mem_get_info(device)
    return left < there_is / 2


def _is_short(one: Measured) -> bool:
    return min([one.cold_s, *one.seconds]) < _SHORT_S


def _cost(one: Measured, shares_memory: bool) -> float:
    """Seconds that a round takes at most."""
    seconds = min([one.cold_s, *one.seconds])
    return 2 * seconds if _is_short(one) and not shares_memory else seconds


@contextmanager
def _caught(one: Measured) -> Iterator[None]:
    """Keep an exception as the result, without the memory that its frames hold."""
    try:
        yield
    except Exception as error:  # whatever a kernel, a driver or a peer raises
        one.error = error.with_traceback(None)
