"""The names of the backends, and the one that a caller has chosen."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Fastest first. The reference takes every call that the checks of the op let through.
ORDER = ("triton", "cuda", "native", "reference")

_forced: ContextVar[str | None] = ContextVar("forced backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Ask this one of `ORDER` alone, in this thread; it never falls back in silence.

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
    """The backend that `use_backend` has chosen; None: whoever takes a call."""
    return _forced.get()
