"""The executor of whole frames: a chain of causal layers, and what they remember of one video.

Chunks of frames go through the chain depth first. Nothing but the causal convolutions reads across
frames, and each keeps its own tail, so any split of the frames after the first gives the same
result (the first frame takes a path of its own and stands alone). The steps of a stream are
therefore free to be as short as memory and cache like: the small early layers of a decoder take
several latents at a time, the large late ones a frame or two, and what is done leaves before the
next enters.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..layers.causal_layer import CausalLayer
from ..layers.frame_runs import Settling, fitted, largest_part, parts
from ..layers.temporal_cache import TemporalCache
from .static_frames import StaticEnd

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
        self._static_end = StaticEnd(chains)
        self._is_static = False

    @property
    def caches(self) -> list[TemporalCache]:
        """All that is remembered of the video."""
        return [self.cache]

    @property
    def behind(self) -> Settling:
        """What leaves of the chunk that `takes` was told of."""
        return self._static_end.behind

    def takes(self, frames: int, repeats: int) -> int | None:
        """Tell of the next chunk, and how many of its last frames are alike; 0: nobody knows.

        Returns:
            How many of the frames `advance` wants, the first ones, because those behind make no
            difference; None: all.
        """
        self._is_static = self._static_end.takes(frames, max(0, repeats))
        return self._static_end.needed if self._is_static else None

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk through.

        Args:
            x: `[B, C, T, H, W]`, channels-last: all of it, or the frames that it takes.

        Returns:
            An iterator of runs of frames as they leave the last layer, those of the whole chunk.
        """
        if self._is_static:
            push = functools.partial(advance, cache=self.cache, part_bytes=self._part_bytes)
            return self._static_end.advance(x, self.cache, push)
        return advance(self._chains, x, self.cache, self._part_bytes)

    def tails(self) -> Tails:
        """What is remembered, on whole frames."""
        return self.cache.tails()

    def take(self, tails: Tails) -> None:
        """Go on from what another executor of the same video remembered."""
        self.cache.take(tails)


def advance(
    chains: Sequence[Sequence[CausalLayer]],
    x: Tensor,
    cache: TemporalCache,
    part_bytes: int,
    start: tuple[int, int] = (0, 0),
) -> Iterator[Tensor]:
    """Push one chunk of frames through the network, depth first.

    All layers are called from here, however often a chunk is cut, so that a traceback from inside
    one is as short for the last layer as for the first.

    Args:
        chains: The layers, in runs; between two runs the frames of a chunk come together again,
            because the layer that begins the next takes them in groups.
        x: `[B, C, T, H, W]`, channels-last; a single frame while the cache says that it is the
            first.
        cache: The state of the video.
        part_bytes: Where a layer's activation would be larger, its frames go on in parts.
        start: Run and layer in it that take `x`.

    Yields:
        Runs of frames as they leave the last layer.
    """
    joined, at = x, start[1]
    for number in range(start[0], len(chains)):
        layers, last = chains[number], number + 1 == len(chains)
        done: list[Tensor] = []
        waiting: list[tuple[int, Iterator[Tensor]]] = []
        y: Tensor | None = joined
        # What begins a run takes all frames of the chunk.
        ready = at < len(layers) and ((number > 0 and at == 0) or layers[at].pairs)
        if ready:
            y = _fitted(layers[at], joined, cache)
        while y is not None:
            if at < len(layers):
                layer = layers[at]
                part = 0 if ready else _cut(layer, y, part_bytes)
                if not part:
                    y = layer(y if ready else _fitted(layer, y, cache), cache)
                    if cache.thrifty:
                        cache.park()
                    at, ready = at + 1, False
                    continue
                waiting.append((at, parts(y, _wanted(layer, y), part, cache.attempt)))
            elif last:
                yield y
            else:
                done.append(y)
            y = None  # let go of it before the next part is made
            at, y = _next_part(waiting)
            ready = True
        if not last:
            joined, at = cache.attempt(functools.partial(join, done)), 0


def _cut(layer: CausalLayer, x: Tensor, part_bytes: int) -> int:
    """The frames of a part of `x` that a layer is to get at once; 0: all of them."""
    frames = _wanted(layer, x)
    nbytes = x.nbytes // x.shape[2] * frames * layer.growth
    if nbytes <= part_bytes:
        return 0
    part = largest_part(frames, nbytes, part_bytes, even=not layer.repeats)
    return part if part < frames else 0


def _fitted(layer: CausalLayer, x: Tensor, cache: TemporalCache) -> Tensor:
    frames = _wanted(layer, x)
    return x if frames == x.shape[2] else cache.attempt(lambda: fitted(x, frames))


def _wanted(layer: CausalLayer, x: Tensor) -> int:
    """The frames that a layer is to get, where those of `x` have come."""
    return layer.wants(x.shape[2]) if layer.repeats else x.shape[2]


def _next_part(waiting: list[tuple[int, Iterator[Tensor]]]) -> tuple[int, Tensor | None]:
    """The next part of what was cut last, and the layer that it is for; None: all have gone."""
    while waiting:
        at, runs = waiting[-1]
        for part in runs:
            return at, part
        waiting.pop()
    return 0, None


def join(runs: list[Tensor]) -> Tensor:
    """Runs of frames as one."""
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim=2)
