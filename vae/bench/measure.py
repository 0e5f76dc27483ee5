"""What a call takes: seconds, and the peak of memory above what was there before it.

PyTorch tells the peak of a GPU's memory. On a CPU it is that of the process: Linux tells it and
starts anew when asked to; elsewhere a thread looks every few milliseconds, if psutil is there.
"""

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ..planning.device_memory import trim_heap

_Result = TypeVar("_Result")

_PROCESS = Path("/proc/self")

# Between two looks at the memory of the process. What is shorter than that has few bytes: memory
# that is touched for the first time comes at some GB a second.
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Taken:
    """What one call took.

    Attributes:
        seconds: With the work that it left to the device.
        peak_bytes: Memory at its height, above what was there before; None: nobody tells.
    """

    seconds: float
    peak_bytes: int | None


class Memory(Protocol):
    """Measures the peak of one call at a time."""

    def start(self) -> None:
        """From here on."""

    def stop(self) -> int | None:
        """Bytes above those at the start, at most; None: nobody tells."""


class Gauge:
    """Measures calls one after the other.

    Args:
        device: Where they work.
        clock: Gives seconds.
        memory: Measures the peak; None: what this device and system have.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        memory: Memory | None = None,
    ) -> None:
        self._clock = clock
        self._on_host = device.type == "cpu"
        self._wait = _synchronize(device)
        self._memory = memory or memory_of(device)

    def __call__(self, run: Callable[[], _Result]) -> tuple[_Result, Taken]:
        """Run it, with nothing left over from before.

        Returns:
            What it returns, and what it took.
        """
        # The young objects, of the call before; all of a large process would take a second.
        gc.collect(1)
        if self._on_host:
            trim_heap()
        self._wait()
        self._memory.start()
        try:
            start = self._clock()
            result = run()
            self._wait()
            seconds = self._clock() - start
        finally:
            peak_bytes = self._memory.stop()
        return result, Taken(seconds, peak_bytes)


def memory_of(device: torch.device) -> Memory:
    """What measures the peak of a device's memory here."""
    if device.type != "cpu":
        module = getattr(torch, device.type, None)
        return (
            DeviceMemory(module, device) if hasattr(module, "max_memory_allocated") else Unknown()
        )
    if HighWater.works():
        return HighWater()
    resident = _resident()
    return Unknown() if resident is None else Sampled(resident)


class DeviceMemory:
    """PyTorch's own count, of tensors.

    Args:
        module: That of the kind of device, such as `torch.cuda`.
        device: The device.
    """

    def __init__(self, module: Any, device: torch.device) -> None:  # noqa: ANN401, a module
        self._module, self._device = module, device
        self._before = 0

    def start(self) -> None:
        """From here on."""
        self._module.reset_peak_memory_stats(self._device)
        self._before = self._module.memory_allocated(self._device)

    def stop(self) -> int:
        """Bytes above those at the start."""
        return self._module.max_memory_allocated(self._device) - self._before


class HighWater:
    """The highest resident memory of this process, as Linux notes it."""

    def __init__(self) -> None:
        self._before = 0

    @staticmethod
    def works() -> bool:
        """Whether the system notes it, and starts anew when asked to."""
        try:
            (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
            return "VmHWM" in (_PROCESS / "status").read_text(encoding="utf-8")
        except OSError:
            return False

    def start(self) -> None:
        """From here on."""
        (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
        self._before = _status("VmRSS")

    def stop(self) -> int:
        """Bytes above those at the start."""
        return max(0, _status("VmHWM") - self._before)


class Sampled:
    """The highest of what a thread sees.

    Args:
        resident: Gives the bytes that are in use.
    """

    def __init__(self, resident: Callable[[], int]) -> None:
        self._resident = resident
        self._before = self._highest = 0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From here on."""
        self._before = self._highest = self._resident()
        self._done.clear()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Bytes above those at the start."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        return max(self._highest, self._resident()) - self._before

    def _look(self) -> None:
        while not self._done.wait(_LOOK_SECONDS):
            self._highest = max(self._highest, self._resident())


class Unknown:
    """Nobody tells."""

    def start(self) -> None:
        """From here on."""

    def stop(self) -> None:
        """Nothing is known."""


def _resident() -> Callable[[], int] | None:
    """What gives the resident memory of this process; None: nothing does."""
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


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _synchronize(device: torch.device) -> Callable[[], object]:
    """What waits for all that a device was given to do."""
    wait = getattr(getattr(torch, device.type, None), "synchronize", None)
    if device.type == "cpu" or wait is None:
        return lambda: None
    return wait if device.type == "mps" else lambda: wait(device)
