"""The names of the backends, and the backend that a caller has selected."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Fastest first. The reference accepts every call that passes the checks of the op.
ORDER = ("triton", "cuda", "native", "reference")

_forced: ContextVar[str | None] = ContextVar("forced backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every op on one backend in this thread, without fallback.

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
    """Return the backend that `use_backend` has selected; None: any."""
    return _forced.get()
