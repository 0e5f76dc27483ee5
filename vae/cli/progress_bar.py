"""Progress of a command: a bar in a terminal, or a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor
from tqdm import tqdm

# Seconds before the bar appears.
BAR_DELAY_S = 2
# Seconds between two lines, and before the first.
LINE_EVERY_S = 10.0


class ProgressBar:
    """Counts progress, as a context manager.

    In a terminal it is a bar. A log would store every state of a bar, so if stderr is not a
    terminal, a line is printed every ten seconds, and none at the end. `total` may change.
    """

    def __init__(
        self,
        task: str,
        total: int | None,
        *,
        unit: str = "frames",
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._task, self._unit, self._quiet, self._clock = task, unit, quiet, clock
        self._done = 0
        self._bar: tqdm | None = None

    def __enter__(self) -> "ProgressBar":
        self._start = self._shown = self._clock()
        if not self._quiet and sys.stderr is not None and sys.stderr.isatty():
            self._bar = tqdm(
                total=self.total,
                unit=f" {self._unit}",
                delay=BAR_DELAY_S,
                leave=False,
                dynamic_ncols=True,
            )
        return self

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
        if self._quiet or sys.stderr is None:
            return
        time_s = self._clock()
        if time_s - self._shown >= LINE_EVERY_S:
            self._shown = time_s
            sys.stderr.write(f"{self._line(time_s - self._start)}\n")
            sys.stderr.flush()

    def _line(self, seconds: float) -> str:
        if self.total is None or self.total < self._done:
            return f"{self._task}: {self._done} {self._unit}, {seconds:.1f} s"
        left = seconds / self._done * (self.total - self._done)
        return f"{self._task}: {self._done} of {self.total} {self._unit}, {left:.1f} s left"
