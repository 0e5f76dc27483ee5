"""The executor of whole frames: a run of layers, and what they remember of one video."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from ..layers.causal_layer import CausalLayer
from ..layers.frame_runs import Settling
from ..layers.temporal_cache import TemporalCache
from .pipeline import advance
from .static_frames import Stillness

# Whole frames of what each convolution remembers.
Tails = dict[nn.Module, Tensor]


class Executor:
    """Layers that frames go through one after the other, with the state of the video.

    The video can go on in another executor, which takes over the tails of this one.

    Args:
        chains: The layers, as for `advance`.
        cache: What they remember of the video, or of the tile of it that goes this way.
        part_bytes: As for `advance`.

    Attributes:
        records: A chunk may be recorded as a graph: all of it is done in one `advance`.
        finish: What a run of frames that `advance` yields is given away as.
    """

    records = True

    def __init__(
        self, chains: Sequence[Sequence[CausalLayer]], cache: TemporalCache, part_bytes: int
    ) -> None:
        self.cache = cache
        self.finish: Callable[[Tensor], Tensor] = lambda x: x
        self._chains, self._part_bytes = chains, part_bytes
        self._stillness = Stillness(chains)
        self._rests = False

    @property
    def caches(self) -> list[TemporalCache]:
        """All that is remembered of the video."""
        return [self.cache]

    @property
    def behind(self) -> Settling:
        """What leaves of the chunk that `takes` was told of."""
        return self._stillness.behind

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

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk through.

        Args:
            x: `[B, C, T, H, W]`, channels-last: all of it, or the frames that it takes.

        Returns:
            An iterator of runs of frames as they leave the last layer, those of the whole chunk.
        """
        if self._rests:
            return self._stillness.advance(x, self.cache, self._part_bytes)
        return advance(self._chains, x, self.cache, self._part_bytes)

    def tails(self) -> Tails:
        """What is remembered, on whole frames."""
        return self.cache.tails()

    def take(self, tails: Tails) -> None:
        """Go on from what another executor of the same video remembered."""
        self.cache.take(tails)
