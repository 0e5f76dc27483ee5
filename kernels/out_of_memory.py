"""Which errors say that memory ran out: those of PyTorch, cuDNN and the system."""

import errno

import torch

# What the errors say that PyTorch, cuDNN and the system raise without a type of their own.
_PHRASES = (
    "out of memory",
    "allocate memory",
    "enough memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)
