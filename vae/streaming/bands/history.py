"""The last chunks of a video, with which devices repeat the work of one that failed."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...layers.frame_runs import fitted


@dataclass(frozen=True)
class PastChunk:
    """A chunk that all devices have computed."""

    frames: int  # their number
    first: bool  # it was the first frame of the video
    again: Callable[[], Tensor]  # its first frames `[B, C, t, H, W]`; the others repeat the last

    def whole(self) -> Tensor:
        """Return all frames `[B, C, T, H, W]`."""
        return fitted(self.again(), self.frames)


class History:
    """The chunks that later results depend on: `reach` frames before the next one."""

    def __init__(self, reach: int) -> None:
        self._reach = reach
        self._chunks: deque[PastChunk] = deque()

    @property
    def chunks(self) -> list[PastChunk]:
        """The chunks, oldest first."""
        return list(self._chunks)

    def clear(self) -> None:
        """Release all chunks."""
        self._chunks.clear()

    def add(self, chunk: PastChunk) -> None:
        """Keep `chunk`, and release those that nothing depends on any more."""
        self._chunks.append(chunk)
        frames = sum(each.frames for each in self._chunks)
        while self._chunks and frames - self._chunks[0].frames >= self._reach:
            frames -= self._chunks.popleft().frames
