"""Free memory of a device, and freed memory that the process keeps."""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence

import torch

from ...kernels import GPUS, device_kind, host_bytes, memory_bytes, tensor_limit

# Free memory that is assumed where it is unknown.
_UNKNOWN_BYTES = 8 << 30


def free_bytes(device: torch.device) -> int:
    """Return the free memory of `device`, or 8 GiB if it is unknown."""
    # Blocks that PyTorch keeps for reuse are free, so that a second decode has the same steps.
    return _UNKNOWN_BYTES if (found := _known_bytes(device)) is None else found[0]


def total_bytes(device: torch.device) -> int:
    """Return the memory of `device` that this process may use; on a CPU the free memory."""
    return _UNKNOWN_BYTES if (found := _known_bytes(device)) is None else found[1]


def _known_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the free memory and all of it; both are the free memory of the host on a CPU."""
    if device_kind(device) in GPUS:
        return memory_bytes(device)
    free = host_bytes()
    return None if free is None else (free, free)


def check_holds(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise a `ValueError` if frames `[B, C, T, H, W]` of `shape` do not fit into one tensor."""
    if math.prod(shape) * dtype.itemsize > tensor_limit(device, dtype.itemsize):
        raise ValueError(
            f"the frames are {list(shape)}, too many for a tensor on {device.type}; expected "
            "`decode_stream` with `out` on the CPU"
        )


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
