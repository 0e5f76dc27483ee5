"""The executor of whole frames: a chain of causal layers, and their tails of one video.

Only the causal convolutions read across frames, and each keeps its own tail, so any split of the
frames after the first yields the same result (the first frame takes a separate path).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from ..layers.causal_layer import CausalLayer
from ..layers.frame_runs import Settling
from ..layers.pipeline import advance, joined_runs
from ..layers.temporal_cache import TemporalCache
from .static_frames import StaticEnd


class Executor:
    """Runs the layers of a video in order, and holds its state."""

    records = True

    def __init__(
        self, chains: Sequence[Sequence[CausalLayer]], cache: TemporalCache, part_bytes: int
    ) -> None:
        self.cache = cache
        self.finish: Callable[[Tensor], Tensor] = lambda x: x
        self._chains, self._part_bytes = chains, part_bytes
        self._static_end = StaticEnd(chains)
        self._is_static = False

    @property
    def caches(self) -> list[TemporalCache]:
        """All caches of the video."""
        return [self.cache]

    def close(self) -> None:
        """End what runs for the video, which is nothing here."""

    @property
    def behind(self) -> Settling:
        """The output of the chunk that was passed to `takes`."""
        return self._static_end.behind

    def takes(self, frames: int, repeats: int) -> int | None:
        """Announce a chunk; return how many of its first frames `advance` needs; None: all."""
        self._is_static = self._static_end.takes(frames, max(0, repeats))
        return self._static_end.needed if self._is_static else None

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push a chunk, or the frames that it needs, through; return runs of its frames."""
        if self._is_static:
            push = functools.partial(advance, cache=self.cache, part_bytes=self._part_bytes)
            return self._static_end.advance(x, self.cache, push)
        return advance(self._chains, x, self.cache, self._part_bytes)


def rechunk(pieces: Iterable[Tensor], size: int | None, *, begins: bool = True) -> Iterator[Tensor]:
    """Cut a video in pieces into its first frame and runs of equal length.

    Args:
        pieces: `[B, C, t, H, W]` each, any `t`, in order of time.
        size: Frames per run; None: all frames after the first.
        begins: The first frame is the start of the video; otherwise it is like any other.

    Yields:
        One frame, then runs of `size` frames, the last of which can be shorter. A run is yielded as
        soon as its frames are there, before the next piece is requested.
    """
    held: list[Tensor] = []
    missing: int | None = 1 if begins else size
    for piece in pieces:
        rest = piece
        while missing is not None and rest.shape[2] >= missing:
            yield joined_runs([*held, rest[:, :, :missing]])
            rest = rest[:, :, missing:]
            held, missing = [], size
        if rest.shape[2]:
            held.append(rest)
            missing = None if missing is None else missing - rest.shape[2]
    if held:
        yield joined_runs(held)
