"""The memory of a device, and of the host."""

import os
import sys

import torch

from .kinds import GPUS, device_kind, runtime

# Kernels for Apple GPUs count elements in 31 bits before PyTorch 2.14 (pytorch/pytorch#192213). A
# Metal array of more than 2^32 bytes ends the process, on macOS 15 too (pytorch/pytorch#149325).
_METAL_ELEMENTS, _METAL_BYTES = (1 << 31) - 1, (1 << 32) - 1


def release_cached(device: torch.device) -> None:
    """Return the memory that PyTorch keeps for reuse on `device` to the driver."""
    release = getattr(runtime(device), "empty_cache", None)
    if release is not None:
        release()


def tensor_limit(device: torch.device, itemsize: int) -> int:
    """Return the most bytes of a tensor on `device`, with elements of `itemsize` bytes."""
    if device_kind(device) != "apple":
        return sys.maxsize
    return min(_METAL_ELEMENTS * itemsize, _METAL_BYTES)


def memory_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that tensors can take on a GPU, and all of this process; None: unknown."""
    try:
        kind = device_kind(device)
        if kind == "apple":
            return _shared_bytes()
        return _own_bytes(device) if kind in GPUS else None
    except (AttributeError, RuntimeError):  # an older PyTorch, or a driver that does not know
        return None


def host_bytes() -> int | None:
    """Return the free memory of the host; None: unknown."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows, macOS
        pass
    try:
        import psutil  # noqa: PLC0415, optional; ComfyUI has it
    except ImportError:
        return None
    return psutil.virtual_memory().available


def _shared_bytes() -> tuple[int, int]:
    """Return the memory of an Apple GPU, which is the host's: Metal recommends a share of it."""
    most, taken = torch.mps.recommended_max_memory(), torch.mps.current_allocated_memory()
    cached = torch.mps.driver_allocated_memory() - taken
    free, host = max(0, most - taken), host_bytes()
    return free if host is None else min(free, host + max(0, cached)), most


def _own_bytes(device: torch.device) -> tuple[int, int]:
    """Return the memory of a GPU with its own."""
    module = runtime(device)
    if not module.is_available():
        raise RuntimeError("there is no such device")
    stats, names = module.memory_stats(device), ("reserved", "active")
    reserved, active = (stats.get(f"{name}_bytes.all.current", 0) for name in names)
    try:
        free, total = module.mem_get_info(device)
    except (AttributeError, RuntimeError):  # some Intel drivers do not know what others use
        if device_kind(device) != "intel":
            raise
        total = module.get_device_properties(device).total_memory
        free = total - reserved
    # The share that `set_per_process_memory_fraction` leaves; PyTorch 2.8 and newer.
    share = getattr(module, "get_per_process_memory_fraction", None)
    allowed = total if share is None else int(total * share(device))
    return max(0, min(free + reserved, allowed) - active), allowed
