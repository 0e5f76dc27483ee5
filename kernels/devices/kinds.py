"""The kinds of devices, what they compute, and calls with another name on each.

Choices that depend on the maker of a device ask `device_kind` and nothing else: PyTorch for AMD
GPUs calls its devices `cuda` too.
"""

import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Kinds by PyTorch's type of a device; `cuda` is NVIDIA's or AMD's. Meta tensors have no device.
_KINDS = {"cpu": "cpu", "meta": "cpu", "xpu": "intel", "mps": "apple"}

# Types of devices that have an index.
_INDEXED = ("cuda", "xpu", "mps")

# The kinds of GPUs.
GPUS = ("nvidia", "amd", "intel", "apple")

# Metal has no bfloat16 before this version of macOS.
_BFLOAT16_MACOS = 14


def is_rocm() -> bool:
    """Return whether PyTorch is built for AMD GPUs."""
    return torch.version.hip is not None


def device_kind(device: torch.device) -> str:
    """Return the kind of `device`: "nvidia", "amd", "intel", "apple", "cpu" or "other"."""
    if device.type == "cuda":
        return "amd" if is_rocm() else "nvidia"
    return _KINDS.get(device.type, "other")


def device_name(device: torch.device) -> str:
    """Return the name of `device` if it is a GPU, such as "NVIDIA H200"; otherwise its type."""
    kind = device_kind(device)
    if kind == "apple":
        version = platform.mac_ver()[0]
        return f"Apple GPU, macOS {version}" if version else "Apple GPU"
    name = getattr(runtime(device), "get_device_name", None) if kind in GPUS else None
    return device.type if name is None else name(device)


def amd_chip(device: torch.device) -> str:
    """Return the chip of the AMD GPU `device`, such as "gfx1100"."""
    return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]


def default_device() -> torch.device:
    """Return the accelerator of this machine, or the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type)


def with_index(device: torch.device) -> torch.device:
    """Return a GPU with its index, the current one's if it has none, as tensors have one.

    Other devices, and a GPU that is not there, stay as they are.
    """
    if device.index is not None or device.type not in _INDEXED:
        return device
    if device_kind(device) == "apple":
        return torch.device("mps", 0) if torch.backends.mps.is_available() else device
    module = runtime(device)
    return torch.device(device.type, module.current_device()) if module.is_available() else device


def lacks(device: torch.device, dtype: torch.dtype) -> str:
    """Return why `device` does not compute in `dtype`; "" if it does, or nothing is known."""
    kind = device_kind(device)
    if kind == "apple" and dtype == torch.float64:
        return "Apple GPUs have no float64"
    if kind == "apple" and dtype == torch.bfloat16:
        new = torch.backends.mps.is_macos_or_newer(_BFLOAT16_MACOS, 0)
        return "" if new else f"bfloat16 needs macOS {_BFLOAT16_MACOS} or later on an Apple GPU"
    if kind == "intel" and dtype == torch.float64:
        has = getattr(torch.xpu.get_device_properties(device), "has_fp64", True)
        return "" if has else f"{device_name(device)} has no float64"
    return ""


def has_bfloat16(device: torch.device) -> bool:
    """Return whether `device` is a GPU that computes in bfloat16 without emulation."""
    kind = device_kind(device)
    if kind in ("nvidia", "amd"):
        if not torch.cuda.is_available():
            return False
        with current(device):  # PyTorch asks the current one
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return kind in GPUS and not lacks(device, torch.bfloat16)


def has_own_memory(device: torch.device) -> bool:
    """Return whether tensors on `device` are not in the pages of the process."""
    return device.type not in ("cpu", "meta")


def sums_float64(device: torch.device) -> bool:
    """Return whether `device` is a GPU that sums in float64 without a conversion by its driver."""
    return device_kind(device) in ("nvidia", "amd")


def searches_shapes(device: torch.device) -> bool:
    """Return whether the library of `device` looks for an algorithm at each new shape."""
    # MIOpen takes 7.6 to 83 s for the first convolution of a shape (ROCm/TheRock#2591). So a video
    # has few shapes there: the first frame, and steps of one length.
    return device_kind(device) == "amd"


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all queued work."""
    wait = getattr(runtime(device), "synchronize", None)
    if device.type == "mps" and wait is not None:
        wait()
    elif device.type != "cpu" and wait is not None:
        wait(device)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is the current one of its type, for a launch."""
    here = getattr(runtime(device), "device", None)
    return nullcontext() if here is None or device.type == "cpu" else here(device)


def runtime(device: torch.device) -> Any:  # noqa: ANN401, a module
    """Return the module of the type of `device`, such as `torch.cuda`, or None."""
    return getattr(torch, device.type, None)
