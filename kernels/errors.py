"""Exceptions of the backends, recognition of out-of-memory errors, and one-time warnings."""

import errno
import logging
import re

import torch

_logger = logging.getLogger(__name__)

# Most characters of an error in the log.
_REASON_LENGTH = 80
_logged: set[str] = set()

# Parts of the messages of PyTorch, cuDNN and the system that have no exception type of their own.
_PHRASES = (
    "out of memory", "allocate memory", "enough memory", "ALLOC_FAILED", "ALLOCATION_FAILED",
    "bad_alloc",
)  # fmt: skip


class Refusal(Exception):  # noqa: N818, an answer, not an error
    """A backend does not support this call; the message is the reason, without a full stop."""


class BackendError(ValueError):
    """No allowed backend supports the call; the message lists every reason."""

    def __init__(self, op: str, reasons: dict[str, str]) -> None:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"no backend runs this {op} ({listed})")
        self.reasons = reasons


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that memory ran out, on a device or on the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    named = isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)
    return named or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def first_line(error: BaseException) -> str:
    """Return the first line of the message of `error`."""
    return str(error).strip().partition("\n")[0]


def first_error(output: str) -> str:
    """Return the line of the output of a compiler or linker that has the error; "": no output."""
    # Microsoft's linker: "LINK : fatal error LNK1104: ..."; NVRTC: "a.cu(2): error #20: ...".
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror( #?\w+)?:", line, re.IGNORECASE)]
    return (errors or lines or [""])[0][:200]


def log_once(message: str) -> None:
    """Log `message` as a warning, once per process: what is missing and what to do, in one line."""
    if message not in _logged:
        _logged.add(message)
        _logger.warning("Fast Video VAE: %s", message)


def log_failure(name: str, op: str, where: str, error: Exception) -> None:
    """Log once that the backend `name` failed for `op` with `error` on the device `where`."""
    reason = first_line(error)[:_REASON_LENGTH]
    log_once(
        f"{name} {op} failed on {where} ({type(error).__name__}: {reason}); another backend runs "
        "such calls"
    )
