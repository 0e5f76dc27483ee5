"""What is done once before kernels run: builds, trials, recordings. Who tells where time goes asks.

A first run takes longer than the next ones for it, by minutes where a compiler works.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

# The last ones; a process has a few dozens.
_MOST = 1000


class Preparation(NamedTuple):
    """One of them; its ends are on the clock of `time.perf_counter`, that by an error too.

    Attributes:
        kind: `kernel build`, `graph capture`, `compile`.
        label: What was built, or tried.
        thread: That did it, as `threading.get_ident` names it.
    """

    kind: str
    label: str
    start: float
    end: float
    thread: int


_done: deque[Preparation] = deque(maxlen=_MOST)


@contextmanager
def preparing(kind: str, label: str = "") -> Iterator[None]:
    """Note what is done inside, as a `Preparation`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        thread = threading.get_ident()
        _done.append(Preparation(kind, label, start, time.perf_counter(), thread))


def preparations() -> list[Preparation]:
    """Those of this process, in the order in which they ended."""
    return list(_done)
