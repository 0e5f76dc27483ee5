"""Whether a device computes rightly: checked once per machine, in the background.

Drivers and libraries have returned wrong frames without an error: Apple's pads and convolutions by
chip (ComfyUI#16433, #15793, #15010), cuDNN 9.8 to 9.10. So the first use of a device in a dtype
runs `cases.py` there. If a result is wrong, the first `SETS` with right results serves instead. The
verdict is kept on disk for this device, driver, PyTorch and sources.
"""

import contextlib
import contextvars
import functools
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....kernels import (
    Fallback,
    Job,
    always_searches,
    apart,
    device_kind,
    device_name,
    first_line,
    goes_on,
    is_out_of_memory,
    kernel_facts,
    key_of,
    library_of,
    log_once,
    queue,
    report,
    with_index,
)
from ...validation import dtype_name
from .cases import EXPECTED, Case, cases

_logger = logging.getLogger(__name__)

_PLAIN = Fallback(reference=True, sliced=True, contiguous=True)

# What is tried in place of a part that is wrong, the cheapest first.
SETS = (
    Fallback(reference=True),
    Fallback(sliced=True),
    Fallback(contiguous=True),
    Fallback(reference=True, sliced=True),
    _PLAIN,
    Fallback(float32=True),
    _PLAIN | Fallback(float32=True),
    Fallback(cpu=True),
)

_CPU = torch.device("cpu")

# How often a case is run that ends by an error.
_TRIES = 2

# Sources that decide the results, next to those of the kernels.
_FOLDERS = ("layers", "layers/inputs", "models", "streaming/prepared")

_lock = threading.Lock()
_jobs: dict[tuple[torch.device, torch.dtype], Job] = {}
_verdicts: "dict[tuple[torch.device, torch.dtype], Verdict]" = {}
_unproved = set[tuple[torch.device, torch.dtype]]()  # of videos before their verdict


class Row(NamedTuple):
    """The result of a case."""

    case: Case
    error: float  # infinite for NaN and where it could not run
    bound: float
    reason: str = ""  # why it could not run

    @property
    def is_right(self) -> bool:
        """Whether the error is within the bound."""
        return self.error <= self.bound


class Verdict(NamedTuple):
    """What a check has shown."""

    fallback: Fallback
    text: str  # what is wrong, in one line; empty: nothing
    tried: tuple[tuple[str, str], ...] = ()  # sets in words, and what was wrong with each


def verdicts_of(device: torch.device) -> dict[torch.dtype, Verdict]:
    """Return what is known of a device, by dtype."""
    device = with_index(device)
    return {dtype: verdict for (where, dtype), verdict in [*_verdicts.items()] if where == device}


def fallback_of(device: torch.device, dtype: torch.dtype) -> Fallback:
    """Return what the next videos in `dtype` use on a device in place of what is wrong there."""
    # As far as it is known: nothing waits for a check.
    key = with_index(device), dtype
    known = _verdicts.get(key)
    if known is None:
        _unproved.add(key)
        return Fallback()
    return known.fallback


def check_once(device: torch.device, dtype: torch.dtype) -> Job:
    """Return the job of the check of a device in a dtype, which begins unless it is known.

    None begins where the library would search for an algorithm at each of 200 shapes for minutes.
    """
    key = device, dtype = with_index(device), dtype
    with _lock:
        job = _jobs.get(key)
        if job is not None:
            return job
        job = _jobs[key] = Job(f"the check of {device} in {dtype_name(dtype)}", lambda: _check(key))
    try:
        if device.type == "meta" or _is_known(key) or always_searches(device):
            job.skip()
        elif device_kind(device) == "apple":
            # Work in two threads ends the process there (pytorch/pytorch#197805), so it is done at
            # once, which takes a second as a VAE is loaded. Without memory it is left out.
            job.run()
            job.skip()
        else:
            queue(job)
    except Exception:  # No user's work ends by a check.
        _logger.debug("%s failed", job.name, exc_info=True)
        job.skip()
    return job


def rows(
    device: torch.device,
    dtype: torch.dtype,
    fallback: Fallback = Fallback(),  # noqa: B008, it is frozen
    wanted: Iterable[Case] | None = None,
) -> Iterator[Row]:
    """Yield the results of the wanted cases on a device, all by default, with a `fallback`."""
    device, dtype = (_CPU if fallback.cpu else device), torch.float32 if fallback.float32 else dtype
    seen = replace(library_of(device), fallback=fallback)
    for case in cases() if wanted is None else wanted:
        goes_on()
        error, reason = math.inf, ""
        for _ in range(_TRIES):
            try:
                error, reason = case.error(device, dtype, seen), ""
                break
            except Exception as failure:
                if is_out_of_memory(failure):
                    raise
                reason = first_line(failure)[:80] or type(failure).__name__
        yield Row(case, error, case.bounds[dtype], reason)


def judged(found: Sequence[Row], device: torch.device, dtype: torch.dtype) -> Verdict:
    """Return what the usual results of all cases mean, after a search for a set that is right."""
    wrong = [row for row in found if not row.is_right]
    if not wrong:
        return Verdict(Fallback(), "")
    shown = wrong[0].case.name + f" ({wrong[0].reason})" * bool(wrong[0].reason)
    more = f", {len(wrong) - 1} more" * (len(wrong) > 1)
    what = f"wrong results in {dtype_name(dtype)}: {shown}{more}"
    end = report(device)
    # Those that were wrong come first, because a set with a wrong result is not looked at further.
    order = [row.case for row in sorted(found, key=lambda row: row.is_right)]
    tried = list[tuple[str, str]]()
    for fallback in SETS:
        if fallback.cpu and device.type == "cpu":
            break
        faults = (row.case.name for row in rows(device, dtype, fallback, order) if not row.is_right)
        fault = next(faults, "")
        tried.append((fallback.words, fault))
        if not fault:
            text = f"{what}; {fallback.words} instead; {end}"
            return Verdict(fallback, text, tuple(tried))
    return Verdict(Fallback(), f"{what}; nothing replaces it; {end}", tuple(tried))


def _check(key: tuple[torch.device, torch.dtype]) -> None:
    """Check a device in a dtype, and keep the verdict."""
    device, dtype = key
    verdict = Verdict(Fallback(), f"the check of {device} ended the process twice")

    def find() -> dict[str, Any]:
        nonlocal verdict
        with apart(device):  # one stream, because each has memory of its own
            found = list(rows(device, dtype))
            verdict = judged(found, device, dtype)
        if any(row.reason for row in found):
            raise _UnsureError
        return {"instead": list(verdict.fallback.names), "text": verdict.text}

    def search() -> None:
        nonlocal verdict
        with contextlib.suppress(_UnsureError):
            kept = kernel_facts(device).once(_name_of(*key), find, lambda x: bool(_kept(x)))
            verdict = _kept(kept) or verdict

    # Not with the backend that a caller has selected.
    contextvars.Context().run(search)
    _settle(key, verdict)


class _UnsureError(Exception):
    """An error in a case, which may not come again: the verdict holds in this process only."""


def _kept(value: object) -> Verdict | None:
    """Return the verdict that the store has; None: it has none."""
    try:
        names, text = value["instead"], value["text"]  # type: ignore[index]
        return Verdict(Fallback(**dict.fromkeys(names, True)), str(text))
    except (KeyError, TypeError):
        return None


def _is_known(key: tuple[torch.device, torch.dtype]) -> bool:
    """Return whether the store has a verdict, which then holds."""
    verdict = _kept(kernel_facts(key[0]).get(_name_of(*key)))
    if verdict is not None:
        _settle(key, verdict)
    return verdict is not None


def _settle(key: tuple[torch.device, torch.dtype], verdict: Verdict) -> None:
    """Let the next videos on a device use what a verdict says, and log what is wrong."""
    device, dtype = key

    def fault(each: Verdict, dtype: torch.dtype) -> object:
        return each.fallback or each.text.replace(dtype_name(dtype), "")

    known = [fault(each, other) for other, each in verdicts_of(device).items() if each.text]
    _verdicts[key] = verdict
    if verdict.text and fault(verdict, dtype) not in known:  # in most cases dtypes share it
        late = "; repeat what was decoded or encoded before" * bool(verdict.fallback)
        log_once(f"{device_name(device)}: {verdict.text}{late * (key in _unproved)}")


def _name_of(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of a verdict in the store, with what decides it next to the device."""
    native = " with C++ kernels" if library_of(device).native else ""
    return f"device: {dtype_name(dtype)}{native} {_sources()}"


@functools.cache
def _sources() -> str:
    root = Path(__file__).parents[2]
    found = [path for folder in _FOLDERS for path in sorted((root / folder).glob("*.py"))]
    return key_of((), [*found, EXPECTED])
