"""A lane: one way through a run of layers, with what is remembered on it."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..layers.causal_layer import CausalLayer
from ..layers.frame_runs import Settling
from ..layers.temporal_cache import TemporalCache
from .pipeline import advance
from .static_frames import Stillness


class Lane:
    """Layers that frames go through one after the other, and their state.

    Args:
        chains: The layers, as for `advance`.
        cache: What they remember of the video, or of the tile of it that goes this way.
        part_bytes: As for `advance`.
    """

    def __init__(
        self, chains: Sequence[Sequence[CausalLayer]], cache: TemporalCache, part_bytes: int
    ) -> None:
        self.chains = chains
        self.cache = cache
        self.part_bytes = part_bytes
        self._stillness = Stillness(chains)
        self._rests = False

    def takes(self, frames: int, alike: int) -> int | None:
        """Tell of the next chunk.

        Args:
            frames: Of the chunk.
            alike: Frames up to its last that are like that; 0 or less where nobody knows.

        Returns:
            How many of the frames `advance` wants, the first ones, because those behind make no
            difference; None: all.
        """
        self._rests = self._stillness.takes(frames, max(0, alike))
        return self._stillness.needed if self._rests else None

    @property
    def behind(self) -> Settling:
        """What leaves of that chunk."""
        return self._stillness.behind

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk through.

        Args:
            x: `[B, C, T, H, W]`, channels-last: all of it, or the frames that it takes.

        Returns:
            An iterator of runs of frames as they leave the last layer, those of the whole chunk.
        """
        if self._rests:
            return self._stillness.advance(x, self.cache, self.part_bytes)
        return advance(self.chains, x, self.cache, self.part_bytes)
