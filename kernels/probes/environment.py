"""What decides the result of a measurement: device, driver, versions, processor."""

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path

import torch

from ..devices import amd_chip, device_kind, device_name

# Where Linux describes the processor.
_CPUINFO = Path("/proc/cpuinfo")


def of_device(device: torch.device) -> dict[str, str]:
    """Return name, chip and driver of `device`, and the version of PyTorch."""
    kind, capability = device_kind(device), ""
    if kind == "nvidia":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    elif kind == "amd":
        capability = amd_chip(device)
    return {
        "device": device_name(device),
        "capability": capability,
        "driver": driver() if kind == "nvidia" else "",
        "torch": str(torch.__version__),
    }


def of_products(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return all that decides the speed of products.

    The switches of PyTorch's precision are left out: narrow products wait for memory on a GPU.

    Args:
        device: The device.
        dtype: Dtype of the products.

    Returns:
        Texts by name.
    """
    found = {**of_device(device), "dtype": str(dtype).removeprefix("torch.")}
    if device_kind(device) not in ("nvidia", "amd"):
        found["processor"] = processor()
        found["instructions"] = torch.backends.cpu.get_cpu_capability()
    if device.type == "cpu":
        found["threads"] = str(torch.get_num_threads())
    return found


@functools.cache
def driver() -> str:
    """Return the version of NVIDIA's driver from its management library; "" without it."""
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    text = ctypes.create_string_buffer(96)
    try:
        library = ctypes.CDLL(name)
        if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text)):
            return ""
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return ""
    return text.value.decode(errors="replace")


@functools.cache
def processor() -> str:
    """Return the model of the processor; without one, the name of its architecture."""
    # `platform.processor` starts another process on Linux and macOS.
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            named = (line.partition(":")[2].strip() for line in lines if "model name" in line)
            return next(named, "") or platform.machine()
    except OSError:
        return os.environ.get("PROCESSOR_IDENTIFIER") or platform.machine()
