"""Which backend runs a call: the one place that decides.

Backends carry functions of the same names and signatures as the ops of `kernels/__init__.py`. They
are asked in the order of `ORDER`, fastest first; on a GPU in the order that `trial.py` has measured
there. One that cannot take a call raises `Refusal` with the reason before it does any work, and the
next is asked. What is missing on a machine (a compiler, a package) is such a reason too: found
once, logged once, remembered.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

_logger = logging.getLogger(__name__)

# Fastest first. The reference takes every call that the checks of the op let through.
ORDER = ("triton", "cuda", "native", "reference")

_MODULES = {
    "triton": ".triton_ops.ops",
    "cuda": ".cuda_ops",
    "native": ".native_ops",
    "reference": ".reference",
}

_forced: ContextVar[str | None] = ContextVar("forced backend", default=None)
_loaded: dict[str, ModuleType] = {}
_logged: set[str] = set()


class Refusal(Exception):  # noqa: N818, an answer, not an error
    """A backend does not take this call; the message is the reason, without a full stop."""


class BackendError(ValueError):
    """No backend that may be asked takes the call; the message lists every reason.

    Args:
        op: Name of the op.
        reasons: Backend to reason.

    Attributes:
        reasons: Likewise.
    """

    def __init__(self, op: str, reasons: dict[str, str]) -> None:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"no backend takes this {op} ({listed})")
        self.reasons = reasons


def run(op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
    """Run an op on the first backend that takes it.

    Args:
        op: Its name.
        args: Its arguments.
        kwargs: Its keywords.

    Returns:
        What the op returns.

    Raises:
        BackendError: Nobody takes the call.
    """
    reasons: dict[str, str] = {}
    for name in _order(op, args, kwargs):
        try:
            return ask(name, op, *args, **kwargs)
        except Refusal as refusal:
            reasons[name] = str(refusal)
    raise BackendError(op, reasons)


def run_kernel(op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
    """Run an op on a backend with a kernel for it, for who knows a plain way of his own.

    Args:
        op: Its name.
        args: Its arguments, which have to be those that the op takes.
        kwargs: Its keywords.

    Returns:
        What the op returns; None where the reference would serve.
    """
    for name in _order(op, args, kwargs):
        if name == "reference":
            return None
        try:
            return ask(name, op, *args, **kwargs)
        except Refusal:
            continue
    return None


def _order(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    forced = _forced.get()
    if forced is not None:
        return (forced,)
    if args and getattr(args[0], "is_cuda", False):
        return importlib.import_module(".autotune", __package__).order(op, args, kwargs)
    return ORDER


def ask(backend: str, op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
    """Run an op as `run` does when it comes to this backend.

    Args:
        backend: Its name.
        op: Name of the op.
        args: Its arguments.
        kwargs: Its keywords.

    Returns:
        What the op returns.

    Raises:
        Refusal: The backend does not take the call.
    """
    module = _loaded.get(backend)
    if module is None:
        module = _loaded[backend] = importlib.import_module(_MODULES[backend], __package__)
    function = getattr(module, op, None)
    if function is None:
        raise Refusal("it has no such op")
    return function(*args, **kwargs)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Ask this backend alone, in this thread; it never falls back in silence.

    Args:
        name: One of `ORDER`.

    Raises:
        ValueError: There is no such backend.
    """
    if name not in ORDER:
        raise ValueError(f"backend is {name!r}; expected one of {', '.join(ORDER)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """For a backend: the one that `use_backend` has chosen; None: whoever takes a call."""
    return _forced.get()


def log_once(message: str) -> None:
    """Tell the user of a backend that is not there, once per process.

    Args:
        message: One line: the reason, and what to do about it.
    """
    if message not in _logged:
        _logged.add(message)
        _logger.warning("Fast Video VAE: %s", message)
