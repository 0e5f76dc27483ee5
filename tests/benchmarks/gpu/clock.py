"""The time limits of a run."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Clock:
    """The time limits of a run, in seconds of `now`."""

    until: float  # the end of the run
    section_until: float = math.inf  # the end of the current section
    now: Callable[[], float] = time.time

    def left(self) -> float:
        return min(self.until, self.section_until) - self.now()
