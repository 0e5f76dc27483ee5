"""What a call takes: seconds, and the peak of memory above what was there before it.

PyTorch counts the peak of a GPU's memory. On a CPU it is that of the process: Linux notes it and
starts anew when asked to; elsewhere a thread looks every few milliseconds, if psutil is there.
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

from ...kernels import synchronize
from ..planning.device_memory import trim_heap

_Result = TypeVar("_Result")

# Starts to watch memory, and gives what stops that: the bytes above those at the start at most, or
# None where nothing counts them.
Watch = Callable[[], Callable[[], int | None]]

_PROCESS = Path("/proc/self")

# Between two looks at the memory of the process. What is shorter than that has few bytes: memory
# that is touched for the first time comes at some GB a second.
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Taken:
    """What one call took: seconds with the device's work, and the peak; None: not measured."""

    seconds: float
    peak_bytes: int | None


class Gauge:
    """Measures calls one after the other.

    Args:
        device: Where they work.
        clock: Gives seconds.
        watch: Measures the peak; None: what this device and system have.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        watch: Watch | None = None,
    ) -> None:
        self._device, self._clock = device, clock
        self._watch = watch or memory_watch(device)

    def __call__(self, run: Callable[[], _Result]) -> tuple[_Result, Taken]:
        """Run it, with nothing left over from before; what it returns, and what it took."""
        # The young objects, of the call before; all of a large process would take a second.
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
    """What measures the peak of a device's memory here."""
    if device.type != "cpu":
        module = getattr(torch, device.type, None)
        counts = hasattr(module, "max_memory_allocated")
        return functools.partial(_tensors, module, device) if counts else unknown
    try:  # whether the system notes the peak, and starts anew when asked to
        (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
        if "VmHWM" in (_PROCESS / "status").read_text(encoding="utf-8"):
            return _high_water
    except OSError:
        pass
    read = resident_reader()
    return unknown if read is None else functools.partial(sampled, read)


def unknown() -> Callable[[], None]:
    """Nothing counts the bytes."""
    return lambda: None


def sampled(read: Callable[[], int]) -> Callable[[], int]:
    """The highest of what a thread reads."""
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
    """What reads the resident bytes of this process; None: nothing does."""
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
    """PyTorch's own count, of tensors; the module is such as `torch.cuda`."""
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    return lambda: module.max_memory_allocated(device) - before


def _high_water() -> Callable[[], int]:
    """The highest resident memory of this process, as Linux notes it."""
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    return lambda: max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
