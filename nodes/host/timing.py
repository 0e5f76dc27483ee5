"""Where the time of a prompt went: pieces of work are measured, and told when the prompt has ended.

Who works says so with `span`, or with `instant` and `add`; a node returns `text()`. What kernels
and graphs take to be made ready they note themselves (`kernels.preparations`), and `torch.compile`
what it compiles. A piece belongs to the prompt that runs in its context. Outside of prompts, and in
a thread that a node starts, there is none: such pieces are kept for that thread alone, the last
ones, and never printed. A thread that is run in `contextvars.copy_context()` of its node has the
prompt of the node.

The seconds of a piece are those of the device where both of its ends have a CUDA event, else those
of the host's clock. Nothing waits for the device while there is work: `text` takes the host's
seconds for pieces that the device has not finished, with a mark, and only what is printed at the
end has waited.

At the end of a prompt in which something was measured the table goes to the log, also where it
failed or was interrupted.

Environment:
    FAST_VIDEO_VAE_TIMING: What is printed: `table`, as without it; `json`: one line of JSON; `0` or
        `off`: nothing.
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

# Pieces of one prompt: those of some hours of video. Outside of prompts nobody takes them away.
_MOST_PIECES = 50_000
_MOST_OUTSIDE = 1000

# ComfyUI runs one prompt at a time. More are left only where their end is not told.
_MOST_PROMPTS = 4

_END = object()

_Item = TypeVar("_Item")


class _Prompt:
    """What was measured in one prompt, and how its last piece ended."""

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


def add(kind: str, first: Instant, last: Instant, label: str = "", stopped: str = "") -> None:
    """Add one measured piece, from the `first` moment to the `last`, to the prompt that runs.

    A piece within another one of its thread, by the host's clock, is taken out of that one's time,
    so that all add up; if it has the same kind and label it is a part of that one instead.

    `kind` and `label` name the row of the table, such as `sampling` and `high noise`;
    `timing_report.KINDS` has the order of kinds. `stopped` is "interrupted", "failed", or "" for a
    piece that came to its end.
    """
    context = get_executing_context()
    prompt = _outside.prompt if context is None else _prompt(context.prompt_id)
    prompt.pieces.append((kind, label, first, last, threading.get_ident()))
    prompt.stopped = stopped


@contextmanager
def span(kind: str, label: str = "", device: torch.device | None = None) -> Iterator[None]:
    """Measure what is done inside, also where it raises; as for `add` and `instant`."""
    first, stopped = instant(device), ""
    try:
        yield
    except BaseException as error:
        stopped = _how(error)
        raise
    finally:
        add(kind, first, instant(device), label, stopped)


def drawn(kind: str, items: Iterator[_Item], device: torch.device | None = None) -> Iterator[_Item]:
    """Measure how long each item takes to come; what is done with it meanwhile is not counted.

    Arguments are those of `span`. The items are closed with this, if they can be.
    """
    try:
        while True:
            first = instant(device)
            try:
                item = next(items, _END)
            except BaseException as error:
                add(kind, first, instant(device), stopped=_how(error))
                raise
            if item is _END:
                return
            add(kind, first, instant(device))
            yield item  # type: ignore[misc]
    finally:
        if (close := getattr(items, "close", None)) is not None:
            close()


def text() -> str:
    """The table of the prompt that runs, as far as it is; outside of prompts of this thread."""
    return report().table()


def report() -> TimingReport:
    """What `text` tells, in numbers."""
    context = get_executing_context()
    if context is None:
        return _outside.prompt.report("", wait=False)
    prompt = _prompts.get(context.prompt_id) or _Prompt(0)
    return prompt.report(context.prompt_id, wait=False)


def _how(error: BaseException) -> str:
    """How a piece ended; a generator that nobody draws from any more has not failed."""
    if isinstance(error, GeneratorExit):
        return ""
    stop = InterruptProcessingException, KeyboardInterrupt
    return "interrupted" if isinstance(error, stop) else "failed"


def _prompt(name: str) -> _Prompt:
    """What there is of a prompt, which begins with this where there is nothing."""
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
    """Print what there is of a prompt, and forget it."""
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
    told = prompt.report(name, wait=True)
    _logger.info("%s", told.json() if wanted == "json" else told.table())


def _prepared(measured: list[Measured]) -> list[Measured]:
    """What was compiled, built and captured between the first moment and the last."""
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
    """What `torch.compile` did, as far as PyTorch remembers: its last 64 compilations.

    PyTorch does not tell the thread: it is said to be this one.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")  # who compiles has imported it
    told = getattr(dynamo, "get_compilation_metrics", list)()
    since = time.time() - time.perf_counter()  # it goes by the time of day
    times = [(getattr(each, f"{end}_time_us", None) for end in ("start", "end")) for each in told]
    return [
        Preparation("compile", "", start / 1e6 - since, end / 1e6 - since, thread)
        for start, end in times
        if start and end
    ]


_ends = PromptEnds(_ended)
