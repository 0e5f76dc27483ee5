"""Time measurement of a prompt: pieces of work, logged as one table when the prompt has ended.

A piece belongs to the prompt of its context, which a thread has in `contextvars.copy_context()` of
the node. Its time excludes the pieces within it, so the rows add up to the measured time. Two CUDA
events measure device time; only a table waits for the device. Facts are from ComfyUI 0.33.

FAST_VIDEO_VAE_TIMING sets the output: `table` (default), `json`: one line; `0` or `off`: none.
"""

import json
import logging
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from time import perf_counter as clock
from typing import Any, NamedTuple

import torch
from comfy.model_management import InterruptProcessingException
from comfy_execution import cache_provider, progress
from comfy_execution.utils import get_executing_context

from ...kernels import padded, preparations

_logger = logging.getLogger(__name__)

# Kinds in the order of the table; others follow.
KINDS = (
    *("load", "compile", "kernel build", "graph capture", "conditioning", "LoRA attach"),
    *("denoise", "switch", "VAE encode", "VAE decode", "file"),
)
# How a piece has ended, by its error; a generator that is closed early has not failed.
_ENDS = dict.fromkeys((InterruptProcessingException, KeyboardInterrupt), "interrupted")
_ENDS[GeneratorExit] = ""


class Instant(NamedTuple):
    """A moment in seconds of the host, and on a CUDA device an event on the current stream."""

    seconds: float
    event: torch.cuda.Event | None = None


class _Piece(NamedTuple):
    kind: str
    label: str
    first: Instant
    last: Instant
    thread: int

    def seconds(self) -> float:
        """Return the seconds of the device if both ends have events, otherwise of the host."""
        begin, end = self.first.event, self.last.event
        with suppress(RuntimeError):  # events of two devices, or a failed device
            if begin is not None and end is not None:
                end.synchronize()
                return begin.elapsed_time(end) / 1e3
        return self.last.seconds - self.first.seconds


class _Prompt(cache_provider.CacheProvider):
    """The pieces of a prompt. ComfyUI calls providers of caches at its end, also after an error."""

    def __init__(self, name: str) -> None:
        self.name, self.stopped = name, ""  # how the last piece ended: "interrupted" or "failed"
        self.pieces: deque[_Piece] = deque(maxlen=50_000)  # enough for hours of video
        cache_provider.register_cache_provider(self)

    def should_cache(self, context: object, value: object = None) -> bool:
        return False

    async def on_lookup(self, context: object, value: object = None) -> None:
        pass

    on_store = on_lookup

    def on_prompt_end(self, prompt_id: str) -> None:
        """Log the table of this prompt, or drop it at the end of another one."""
        cache_provider.unregister_cache_provider(self)
        _running.pop(self.name, None)
        wanted = os.environ.get("FAST_VIDEO_VAE_TIMING", "").strip().lower()
        if prompt_id != self.name or wanted in ("0", "off"):
            return
        state, running = progress.get_progress_state(), progress.NodeState.Running
        if getattr(state, "prompt_id", None) == prompt_id:
            early = any(node["state"] == running for node in state.nodes.values())
            self.stopped = (self.stopped or "stopped") if early else ""
        done = self.report()
        _logger.info("%s", json.dumps(done) if wanted == "json" else _table(done))

    def report(self) -> dict[str, Any]:
        """Return wall and measured seconds, and the row of each kind and label."""
        ends = [moment.seconds for piece in self.pieces for moment in (piece.first, piece.last)]
        built = _prepared({piece.thread for piece in self.pieces}, min(ends), max(ends))
        parts = _alone([*built, *self.pieces])
        rows = []
        for key in sorted(parts, key=lambda key: [*KINDS, key[0]].index(key[0])):
            seconds = [max(0.0, each) for each in parts[key].values()]
            row = {"kind": key[0], "label": key[1], "count": len(seconds), "seconds": sum(seconds)}
            if len(seconds) > 1:
                row |= {"min": min(seconds), "median": statistics.median(seconds)}
            rows.append(row)
        known = {"prompt": self.name, "wall": max(ends) - min(ends), "stopped": self.stopped}
        return known | {"measured": sum(row["seconds"] for row in rows), "rows": rows}


_running: dict[str, _Prompt] = {}  # by name


def instant(device: torch.device | None = None) -> Instant:
    """Return the current moment, with an event on the current stream of a CUDA `device`."""
    event = None
    if device is not None and device.type == "cuda":
        with suppress(RuntimeError):  # a failed device, which the work on it reports better
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
    return Instant(clock(), event)


def add(kind: str, first: Instant, last: Instant, label: str = "", stopped: str = "") -> None:
    """Add one measured piece to the current prompt, if any, under the row `kind`, `label`."""
    if (context := get_executing_context()) is not None:
        if (prompt := _running.get(context.prompt_id)) is None:
            prompt = _running[context.prompt_id] = _Prompt(context.prompt_id)
        prompt.pieces.append(_Piece(kind, label, first, last, threading.get_ident()))
        prompt.stopped = stopped


@contextmanager
def span(kind: str, label: str = "", device: torch.device | None = None) -> Iterator[None]:
    """Measure the block, also if it raises; `kind`, `label`, `device` as for `add`, `instant`."""
    first, stopped = instant(device), ""
    try:
        yield
    except BaseException as error:
        stopped = next((how for kind, how in _ENDS.items() if isinstance(error, kind)), "failed")
        raise
    finally:
        add(kind, first, instant(device), label, stopped)


def drawn(
    kind: str, items: Generator[Any], label: str = "", device: torch.device | None = None
) -> Iterator[Any]:
    """Measure the time until each item arrives, without the time in which the caller uses it."""
    with closing(items):
        while True:
            with span(kind, label, device):
                item = next(items, _running)
            if item is _running:
                return
            yield item


def text() -> str:
    """Return the table of the current prompt so far."""
    context = get_executing_context()
    prompt = None if context is None else _running.get(context.prompt_id)
    return "Fast Video VAE: no time was measured" if prompt is None else _table(prompt.report())


def _prepared(threads: set[int], start: float, end: float) -> Iterator[_Piece]:
    """Yield the compilations, builds and captures of `threads` between two moments."""
    done = [(each.kind, each.label, each.start, each.end, each.thread) for each in preparations()]
    dynamo = sys.modules.get("torch._dynamo.utils")
    since = time.time() - clock()  # its times are times of day, and without a thread
    for each in getattr(dynamo, "get_compilation_metrics", list)():
        ends = [(us or 0) / 1e6 - since for us in (each.start_time_us, each.end_time_us)]
        done.append(("compile", "", *ends, min(threads)))
    for kind, label, first, last, thread in done:
        if thread in threads and start <= first <= last <= end:
            yield _Piece(kind, label, Instant(first), Instant(last), thread)


# A piece within another one of its own kind and label is part of that one.
def _alone(pieces: list[_Piece]) -> dict[tuple[str, str], dict[int, float]]:
    """Return for each row the seconds that inner pieces do not cover, by the index of a piece."""
    # Of two pieces with the same ends, the one added later encloses the other.
    order = sorted((each.first.seconds, -each.last.seconds, -at) for at, each in enumerate(pieces))
    found: dict[tuple[str, str], dict[int, float]] = {}
    around: dict[int, list[int]] = {}  # by thread, the outermost first
    for _, end, at in order:
        piece, stack = pieces[-at], around.setdefault(pieces[-at].thread, [])
        while stack and pieces[-stack[-1]].last.seconds < -end:
            stack.pop()
        outer = pieces[-stack[-1]] if stack else None
        if outer is None or outer[:2] != piece[:2]:
            seconds = found.setdefault(piece[:2], {})[at] = piece.seconds()
            if outer is not None:
                found[outer[:2]][stack[-1]] -= seconds
            stack.append(at)
    return found


def _table(report: dict[str, Any]) -> str:
    """Return a line of totals, a header, and a line per row; seconds have three digits."""
    head = f"Fast Video VAE: {report['measured']:.3f} s measured of {report['wall']:.3f} s"
    lines = [("", "", "count", "seconds", "min", "median")]
    for row in report["rows"]:
        more = (f"{row[key]:.3f}" if key in row else "" for key in ("seconds", "min", "median"))
        lines.append((row["kind"], row["label"], str(row["count"]), *more))
    columns = [each for at, each in enumerate(zip(*lines, strict=True)) if at < 2 or any(each[1:])]
    rows = ["  ".join(["", *row]).rstrip() for row in padded([*zip(*columns, strict=True)], 2)]
    return "\n".join([f"{head} ({report['stopped']})" if report["stopped"] else head, *rows])
