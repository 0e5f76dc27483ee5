"""Free memory of a device, and freed memory that the process keeps."""

import ctypes
import functools
import os
from collections.abc import Callable

import torch


def free_bytes(device: torch.device) -> int:
    """Return the free memory of `device`, or 8 GiB if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def trim_heap() -> None:
    """Return freed memory that `malloc` keeps to the system.

    glibc keeps free memory below its topmost block: 300 of 600 MiB after the decode of a video.
    Other libraries return it themselves, or have no such function.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's function; None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # Windows has no default library
        return None
