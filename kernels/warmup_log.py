"""Log of the one-time work before kernels run, which can make a first run minutes longer."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

# Most entries that are kept; a process has a few dozen.
_MOST = 1000


class Preparation(NamedTuple):
    """One-time work; `start` and `end` are seconds of `time.perf_counter`."""

    kind: str  # `kernel build`, `graph capture`, `compile`
    label: str
    start: float
    end: float
    thread: int  # identifier from `threading.get_ident`


_done: deque[Preparation] = deque(maxlen=_MOST)


@contextmanager
def preparing(kind: str, label: str = "") -> Iterator[None]:
    """Record the work of a block as a `Preparation` of `kind` with `label`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        thread = threading.get_ident()
        _done.append(Preparation(kind, label, start, time.perf_counter(), thread))


def preparations() -> list[Preparation]:
    """Return the recorded work of this process, in the order in which it ended."""
    return list(_done)
