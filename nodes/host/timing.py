"""Time measurement of a prompt: pieces of work, logged as a table when the prompt has ended.

A piece belongs to the prompt that runs in its context. In a thread that a node starts there is no
prompt, unless it runs in `contextvars.copy_context()` of the node: its last pieces are never
printed. Device time needs CUDA events at both ends of a piece. Nothing waits for the device during
the work: `text` marks pieces that it has not finished, and only the table at the end waits.

FAST_VIDEO_VAE_TIMING sets the output: `table` (default), `json`: one line; `0` or `off`: none.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from comfy.model_management import InterruptProcessingException
from comfy_execution.utils import get_executing_context

from ...kernels import Preparation, preparations
from .instants import Instant, instant
from .prompt_events import PromptEnds, stopped_early
from .timing_report import Measured, TimingReport

_logger = logging.getLogger(__name__)

# Most pieces of one prompt, enough for hours of video, and of a thread without a prompt.
_MOST_PIECES = 50_000
_MOST_OUTSIDE = 1000

# ComfyUI runs one prompt at a time. More remain only if their end is not reported.
_MOST_PROMPTS = 4

_END = object()

_Item = TypeVar("_Item")


class _Prompt:
    """The pieces of one prompt, and how the last one ended."""

    def __init__(self, most: int) -> None:
        # Kind, label, ends, and the thread.
        self.pieces: deque[tuple[str, str, Instant, Instant, int]] = deque(maxlen=most)
        self.stopped = ""

    def report(self, name: str, *, wait: bool) -> TimingReport:
        measured = []
        for kind, label, first, last, thread in list(self.pieces):
            seconds, sure = first.until(last, wait=wait)
            measured.append(
                Measured(kind, label, first.seconds, last.seconds, seconds, thread, sure)
            )
        return TimingReport(name, [*_prepared(measured), *measured], self.stopped)


class _Outside(threading.local):
    def __init__(self) -> None:
        self.prompt = _Prompt(_MOST_OUTSIDE)


_outside = _Outside()
_prompts: dict[str, _Prompt] = {}
_lock = threading.Lock()


# A piece within another one of its thread is subtracted from that one's time, so that the sum is
# right; with the same kind and label it is part of that one.
def add(kind: str, first: Instant, last: Instant, label: str = "", stopped: str = "") -> None:
    """Add one measured piece to the current prompt, under the row `kind`, `label`."""
    context = get_executing_context()
    prompt = _outside.prompt if context is None else _prompt(context.prompt_id)
    prompt.pieces.append((kind, label, first, last, threading.get_ident()))
    prompt.stopped = stopped


@contextmanager
def span(kind: str, label: str = "", device: torch.device | None = None) -> Iterator[None]:
    """Measure the block, also if it raises; `kind`, `label`, `device` as for `add`, `instant`."""
    first, stopped = instant(device), ""
    try:
        yield
    except BaseException as error:
        stopped = _how(error)
        raise
    finally:
        add(kind, first, instant(device), label, stopped)


def drawn(
    kind: str, items: Iterator[_Item], label: str = "", device: torch.device | None = None
) -> Iterator[_Item]:
    """Measure the time until each item arrives, without the time in which the caller uses it."""
    try:
        while True:
            first = instant(device)
            try:
                item = next(items, _END)
            except BaseException as error:
                add(kind, first, instant(device), label, _how(error))
                raise
            if item is _END:
                return
            add(kind, first, instant(device), label)
            yield item  # type: ignore[misc]
    finally:
        if (close := getattr(items, "close", None)) is not None:
            close()


def text() -> str:
    """Return the table of the current prompt so far, or of this thread outside prompts."""
    return report().table()


def report() -> TimingReport:
    """Return the data of `text`."""
    context = get_executing_context()
    if context is None:
        return _outside.prompt.report("", wait=False)
    prompt = _prompts.get(context.prompt_id) or _Prompt(0)
    return prompt.report(context.prompt_id, wait=False)


def _how(error: BaseException) -> str:
    """Return how a piece ended; a generator that is closed early has not failed."""
    if isinstance(error, GeneratorExit):
        return ""
    stop = InterruptProcessingException, KeyboardInterrupt
    return "interrupted" if isinstance(error, stop) else "failed"


def _prompt(name: str) -> _Prompt:
    """Return the pieces of a prompt, created on first use."""
    found = _prompts.get(name)
    if found is not None:
        return found
    with _lock:
        if name not in _prompts:
            if not _prompts:
                _ends.start()
            while len(_prompts) >= _MOST_PROMPTS:
                del _prompts[next(iter(_prompts))]
            _prompts[name] = _Prompt(_MOST_PIECES)
        return _prompts[name]


def _ended(name: str) -> None:
    """Print the table of a prompt and drop its pieces."""
    with _lock:
        prompt = _prompts.pop(name, None)
        if not _prompts:
            _ends.stop()
    wanted = os.environ.get("FAST_VIDEO_VAE_TIMING", "").strip().lower()
    if prompt is None or wanted in ("0", "off"):
        return
    early = stopped_early(name)
    if early is not None:
        prompt.stopped = (prompt.stopped or "stopped") if early else ""
    done = prompt.report(name, wait=True)
    _logger.info("%s", done.json() if wanted == "json" else done.table())


def _prepared(measured: list[Measured]) -> list[Measured]:
    """Return the compilations, builds and captures between the first moment and the last."""
    if not measured:
        return []
    threads = {piece.thread for piece in measured}
    start, end = min(piece.start for piece in measured), max(piece.end for piece in measured)
    return [
        Measured(each.kind, each.label, each.start, each.end, each.end - each.start, each.thread)
        for each in [*preparations(), *_compiled(measured[0].thread)]
        if each.thread in threads and start <= each.start and each.end <= end
    ]


def _compiled(thread: int) -> list[Preparation]:
    """Return the last 64 compilations of `torch.compile`, which do not name their thread."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # imported by any code that compiles
    metrics = getattr(dynamo, "get_compilation_metrics", list)()
    since = time.time() - time.perf_counter()  # its times are times of day
    times = [
        (getattr(each, f"{end}_time_us", None) for end in ("start", "end")) for each in metrics
    ]
    return [
        Preparation("compile", "", start / 1e6 - since, end / 1e6 - since, thread)
        for start, end in times
        if start and end
    ]


_ends = PromptEnds(_ended)
