"""Memory that is free on a device, and what the process keeps of the host's."""

import ctypes
import functools
import os
from collections.abc import Callable

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device; a small guess where it cannot be asked."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def trim_heap() -> None:
    """Return what `malloc` keeps of freed memory to the system.

    glibc keeps the free memory below its topmost block: 300 of 600 MiB after the decode of a video.
    Other libraries return theirs by themselves, or cannot be asked.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The function of glibc; None where another library is the system's."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # Windows has no library without a name
        return None
