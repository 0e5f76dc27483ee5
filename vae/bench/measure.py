"""Cost of a call: seconds, and peak memory above the level before it.

PyTorch counts the peak of a GPU. On a CPU it is the peak of the process: Linux records it and
resets it on request; elsewhere a thread samples it every few milliseconds if psutil is installed.
"""

import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...kernels import runtime, synchronize
from ..planning.device_memory import trim_heap

_Result = TypeVar("_Result")

# Starts to watch memory, and returns a function that stops it and returns the most bytes above the
# start, or None if they cannot be measured.
Watch = Callable[[], Callable[[], int | None]]

_PROCESS = Path("/proc/self")

# Seconds between two samples. A shorter peak is small: memory is first touched at a few GB/s.
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Taken:
    """Cost of a call: seconds until the device is done, and peak bytes; None: not measured."""

    seconds: float
    peak_bytes: int | None


class Gauge:
    """Measures calls one after the other; `clock` returns seconds."""

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        watch: Watch | None = None,
    ) -> None:
        self._device, self._clock = device, clock
        self._watch = watch or memory_watch(device)

    def __call__(self, run: Callable[[], _Result]) -> tuple[_Result, Taken]:
        """Call `run`; return its result and its cost."""
        # Young objects of the previous call only: a full collection may take a second.
        gc.collect(1)
        if self._device.type == "cpu":
            trim_heap()
        synchronize(self._device)
        stop = self._watch()
        try:
            start = self._clock()
            result = run()
            synchronize(self._device)
            seconds = self._clock() - start
        finally:
            peak_bytes = stop()
        return result, Taken(seconds, peak_bytes)


def memory_watch(device: torch.device) -> Watch:
    """Return the method of measuring peak memory on `device`."""
    if device.type != "cpu":
        module = runtime(device)
        counts = hasattr(module, "max_memory_allocated")
        return functools.partial(_tensors, module, device) if counts else unknown
    try:  # Linux records the peak, and resets it on request
        (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
        if "VmHWM" in (_PROCESS / "status").read_text(encoding="utf-8"):
            return _high_water
    except OSError:
        pass
    read = resident_reader()
    return unknown if read is None else functools.partial(sampled, read)


def unknown() -> Callable[[], None]:
    """Measure nothing."""
    return lambda: None


def sampled(read: Callable[[], int]) -> Callable[[], int]:
    """Measure the peak of the values of `read` with a thread."""
    before = highest = read()
    done = threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(_LOOK_SECONDS):
            highest = max(highest, read())

    def stop() -> int:
        done.set()
        thread.join()
        return max(highest, read()) - before

    thread = threading.Thread(target=look, name="fast-video-vae-memory", daemon=True)
    thread.start()
    return stop


def resident_reader() -> Callable[[], int] | None:
    """Return a function that reads the resident bytes of this process; None: not available."""
    try:
        import psutil  # noqa: PLC0415, optional

        process = psutil.Process()
        return lambda: process.memory_info().rss
    except ImportError:
        pass
    statm = _PROCESS / "statm"
    if not statm.exists():
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return lambda: int(statm.read_text(encoding="ascii").split()[1]) * page


def _tensors(module: Any, device: torch.device) -> Callable[[], int]:  # noqa: ANN401, a module
    """Measure the tensors of a device by PyTorch's counters; `module` is such as `torch.cuda`."""
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    return lambda: module.max_memory_allocated(device) - before


def _high_water() -> Callable[[], int]:
    """Measure the peak resident memory of this process by Linux's counter."""
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    return lambda: max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
