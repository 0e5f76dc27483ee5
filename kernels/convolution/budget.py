"""The time that a piece of work may spend on trials of convolutions, and the choices it keeps."""

import logging
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_logger = logging.getLogger(__name__)

# Seconds of trials in a decode or encode, and in that of a single picture: one of 2160 x 3840 takes
# 0.5 s on H200, a video of 720 x 1280 x 81 less than 3 s. Compilation counts.
BUDGET_S = 2.0
PICTURE_S = 0.5

# A shape class gets this part of the budget at most. Its first candidates are the most promising
# ones, and a compilation takes a second, so that otherwise the first class would take all the time.
_PART = 1 / 4


class TrialBudget:
    """Time for trials in one piece of work, and the choices that hold in it.

    A choice never changes while the work runs, because the layout of its memory depends on it.

    Args:
        budget_s: Seconds of trials; a compilation that has begun is completed.
        picture: The work is one picture, with at most `PICTURE_S`.

    Attributes:
        picture: The work is one picture.
        left_s: Seconds that are left.
        chosen: Candidates in order, by shape class.
        tried: Shape classes with a trial.
        unfinished: Shape classes with candidates that are left for later work.
        is_open: The work runs.
    """

    def __init__(self, budget_s: float = BUDGET_S, *, picture: bool = False) -> None:
        self.picture = picture
        self.budget_s = self.left_s = min(budget_s, PICTURE_S) if picture else budget_s
        self.chosen: dict[Hashable, tuple[str, ...]] = {}
        self.tried = self.unfinished = 0
        self.is_open = True
        self._lock = threading.Lock()

    def deadline(self) -> float:
        """Return until when the trial of one shape class may run, in `time.perf_counter`."""
        return time.perf_counter() + min(self.left_s, self.budget_s * _PART)

    def spend(self, seconds: float, *, finished: bool) -> None:
        """Count the trial of a shape class.

        Args:
            seconds: Seconds that it took.
            finished: No candidate is left.
        """
        self.charge(seconds)
        with self._lock:
            self.tried += 1
            self.unfinished += not finished

    def charge(self, seconds: float) -> None:
        """Count `seconds` that were spent on something else than a shape class."""
        with self._lock:
            self.left_s = max(0.0, self.left_s - seconds)

    def close(self) -> None:
        """End the work, and log its trials."""
        self.is_open = False
        if self.tried:
            later = (
                f"; {self.unfinished} of them continue in the next run" if self.unfinished else ""
            )
            _logger.info(
                "Fast Video VAE: timed the convolutions of %d shapes in %.1f s%s",
                self.tried, self.budget_s - self.left_s, later,
            )  # fmt: skip


_current: ContextVar[TrialBudget | None] = ContextVar("trial budget", default=None)


@contextmanager
def trials(budget: TrialBudget | None = None) -> Iterator[None]:
    """Allow trials of convolutions in this thread until the block ends.

    Trials happen on a GPU, at the first call of a shape class that was not measured on this machine
    before. Without such a block the library's own convolution runs, or what an earlier trial found.

    Args:
        budget: That of the work of which the block is a part, which the caller closes; None: the
            block is a whole work, or a part of that around it.
    """
    before = current()
    if budget is None and before is not None:
        yield
        return
    work = TrialBudget() if budget is None else budget
    _current.set(work)
    try:
        yield
    finally:
        if budget is None:
            work.close()
        # No token: a generator can end in another context than it began in.
        if _current.get() is work:
            _current.set(before)


def current() -> TrialBudget | None:
    """Return the budget of the work that runs; None: there is none."""
    budget = _current.get()
    return budget if budget is not None and budget.is_open else None
