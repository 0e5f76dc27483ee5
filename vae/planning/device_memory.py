"""Free memory of a device, and freed memory that the process keeps."""

import ctypes
import functools
import os
from collections.abc import Callable

import torch

# Free memory that is assumed where it is unknown.
_UNKNOWN_BYTES = 8 << 30

# Blocks that PyTorch has taken from the driver, and those of them that tensors use.
_KINDS = ("reserved", "active")


def free_bytes(device: torch.device) -> int:
    """Return the free memory of `device`, or 8 GiB if it is unknown.

    Blocks that PyTorch keeps for reuse count as free. Otherwise a second decode would find the
    blocks of the first one taken, and run in smaller steps.

    Args:
        device: The device.

    Returns:
        Bytes.
    """
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return _UNKNOWN_BYTES
        free, total = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats(device)
        reserved, active = (stats.get(f"{kind}_bytes.all.current", 0) for kind in _KINDS)
        return max(0, min(free + reserved, _allowed_bytes(device, total)) - active)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN_BYTES


def total_bytes(device: torch.device) -> int:
    """Return the memory of `device` that this process may use; on a CPU the free memory."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return free_bytes(device)
    return _allowed_bytes(device, torch.cuda.mem_get_info(device)[1])


def _allowed_bytes(device: torch.device, total: int) -> int:
    """Return the share of `total` that `torch.cuda.set_per_process_memory_fraction` leaves."""
    share = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.8 and newer
    return total if share is None else int(total * share(device))


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
