"""What a backend answers to a call that it does not take, and which errors say that memory ran out.

What is missing on a machine is logged once per process.
"""

import errno
import logging

import torch

_logger = logging.getLogger(__name__)
_logged: set[str] = set()

# What the errors say that PyTorch, cuDNN and the system raise without a type of their own.
_PHRASES = (
    "out of memory",
    "allocate memory",
    "enough memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "bad_alloc",
)


class Refusal(Exception):  # noqa: N818, an answer, not an error
    """A backend does not take this call; the message is the reason, without a full stop."""


class BackendError(ValueError):
    """No backend that may be asked takes the call; the message lists every reason."""

    def __init__(self, op: str, reasons: dict[str, str]) -> None:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"no backend takes this {op} ({listed})")
        self.reasons = reasons


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


def log_once(message: str) -> None:
    """Log a warning, once per process: in one line what is missing, and what to do about it."""
    if message not in _logged:
        _logged.add(message)
        _logger.warning("Fast Video VAE: %s", message)
