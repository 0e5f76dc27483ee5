"""Progress of a command: a bar in a terminal, or a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from torch import Tensor
from tqdm import tqdm

# Seconds before the bar appears.
BAR_DELAY_S = 2
# Seconds between two lines, and before the first.
LINE_EVERY_S = 10.0


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Counts progress, as a context manager.

    In a terminal it is a bar. A log would store every state of a bar, so if stderr is not a
    terminal, a line is printed every ten seconds, and none at the end. `total` may change.
    """

    def __init__(
        self, task: str, total: int | None, *, unit: str = "frames", quiet: bool = False
    ) -> None:
        self.total, self._done, self._task, self._unit = total, 0, task, unit
        self._start = self._shown = time.monotonic()
        self._log, self._bar = None if quiet else sys.stderr, None
        if self._log is not None and self._log.isatty():
            looks = {"unit": f" {unit}", "leave": False, "dynamic_ncols": True}
            self._bar = tqdm(total=total, delay=BAR_DELAY_S, **looks)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def counted(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield `pieces`, `[B, C, T, H, W]` each; count the frames of each after its use.

        If the video is read again after a failure, a later call counts only what is new.
        """
        at = 0
        for piece in pieces:
            yield piece
            at += piece.shape[2]
            self.update(max(0, at - self._done))

    def update(self, count: int = 1) -> None:
        """Add `count` to the progress."""
        self._done += count
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.update(count)
            return
        time_s = time.monotonic()
        if self._log is None or time_s - self._shown < LINE_EVERY_S:
            return
        self._shown, seconds = time_s, time_s - self._start
        line = f"{self._task}: {self._done} {self._unit}, {seconds:.1f} s"
        if self.total is not None and self._done <= self.total:
            left = seconds / self._done * (self.total - self._done)
            line = f"{self._task}: {self._done} of {self.total} {self._unit}, {left:.1f} s left"
        print(line, file=self._log, flush=True)
