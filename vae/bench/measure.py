"""Cost of a call: seconds, and peak memory above the level before it.

PyTorch counts the peak of a GPU. On a CPU a thread samples the memory of the process every few
milliseconds, which Linux reports, and psutil on other systems.
"""

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from ...kernels import runtime, synchronize
from ..planning.device_memory import trim_heap

_Result = TypeVar("_Result")

_MEMORY = Path("/proc/self/statm")

# Seconds between two samples. A shorter peak is small: memory is first touched at a few GB/s.
_LOOK_SECONDS = 0.002


def measured(device: torch.device, run: Callable[[], _Result]) -> tuple[_Result, float, int | None]:
    """Call `run`; return its result, the seconds, and the peak bytes or None: not measured."""
    # Young objects of the previous call only: a full collection may take a second.
    gc.collect(1)
    if device.type == "cpu":
        trim_heap()
    synchronize(device)
    stop = _watched(device)
    try:
        start = time.perf_counter()
        result = run()
        synchronize(device)
        seconds = time.perf_counter() - start
    finally:
        peak_bytes = stop()
    return result, seconds, peak_bytes


def _watched(device: torch.device) -> Callable[[], int | None]:
    """Watch memory until a call of the result, which returns the most bytes above the start."""
    if device.type == "cpu":
        read = resident_reader()
        return _sampled(read) if read else lambda: None
    module = runtime(device)
    if not hasattr(module, "max_memory_allocated"):
        return lambda: None
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    return lambda: module.max_memory_allocated(device) - before


def _sampled(read: Callable[[], int]) -> Callable[[], int]:
    """Watch the values of `read` with a thread."""
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
    if _MEMORY.exists():
        page = os.sysconf("SC_PAGE_SIZE")
        return lambda: int(_MEMORY.read_text(encoding="ascii").split()[1]) * page
    try:
        import psutil  # noqa: PLC0415, optional
    except ImportError:
        return None
    process = psutil.Process()
    return lambda: process.memory_info().rss
