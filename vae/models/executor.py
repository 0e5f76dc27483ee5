"""The executor of whole frames: chunks are pushed depth first through a chain of causal layers.

Only the causal convolutions read across frames, and each keeps its own tail, so any split of the
frames after the first yields the same result (the first frame takes a separate path). Steps are as
short as memory and cache require: the small early layers of a decoder take several latents at a
time, the large late ones a frame or two, and finished frames leave before the next part starts.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..layers.causal_layer import CausalLayer
from ..layers.frame_runs import fitted, largest_part, parts
from ..layers.temporal_cache import Settling, TemporalCache
from .static_frames import StaticEnd

# Larger than any activation, so that no frames are divided.
_WHOLE = 1 << 62


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


def advance(
    chains: Sequence[Sequence[CausalLayer]],
    x: Tensor,
    cache: TemporalCache,
    part_bytes: int = _WHOLE,
    start: tuple[int, int] = (0, 0),
) -> Iterator[Tensor]:
    """Push one chunk `[B, C, T, H, W]` depth first through the network; yield runs of it."""
    # All layers are called from this function, however often a chunk is divided, so a traceback is
    # as short for the last layer as for the first. Frames are joined between two runs of layers,
    # because the next layer takes them in groups.
    joined, at = x, start[1]
    for number in range(start[0], len(chains)):
        layers, last = chains[number], number + 1 == len(chains)
        done: list[Tensor] = []
        waiting: list[tuple[int, Iterator[Tensor]]] = []
        y: Tensor | None = joined
        # The first layer of a run takes all frames of the chunk.
        ready = at < len(layers) and ((number > 0 and at == 0) or layers[at].pairs)
        if ready:
            y = _fitted(layers[at], joined)
        while y is not None:
            if at < len(layers):
                layer = layers[at]
                part = 0 if ready else _cut(layer, y, part_bytes)
                if not part:
                    y = layer(y if ready else _fitted(layer, y), cache)
                    at, ready = at + 1, False
                    continue
                waiting.append((at, parts(y, _wanted(layer, y), part)))
            elif last:
                yield y
            else:
                done.append(y)
            y = None  # free it before the next part is computed
            at, y = _next_part(waiting)
            ready = True
        if not last:
            joined, at = _join(done), 0


def _cut(layer: CausalLayer, x: Tensor, part_bytes: int) -> int:
    """Return the frames of a part of `x` for a layer; 0: all of them."""
    frames = _wanted(layer, x)
    nbytes = x.nbytes // x.shape[2] * frames * layer.growth
    if nbytes <= part_bytes:
        return 0
    part = largest_part(frames, nbytes, part_bytes, even=not layer.repeats)
    return part if part < frames else 0


def _fitted(layer: CausalLayer, x: Tensor) -> Tensor:
    return fitted(x, _wanted(layer, x)) if layer.repeats else x


def _wanted(layer: CausalLayer, x: Tensor) -> int:
    """Return the frames that a layer takes when those of `x` have arrived."""
    return layer.wants(x.shape[2]) if layer.repeats else x.shape[2]


def _next_part(waiting: list[tuple[int, Iterator[Tensor]]]) -> tuple[int, Tensor | None]:
    """Return the next part of the last division, and its layer; None: all are done."""
    while waiting:
        at, runs = waiting[-1]
        for part in runs:
            return at, part
        waiting.pop()
    return 0, None


def _join(runs: list[Tensor]) -> Tensor:
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim=2)


def rechunk(pieces: Iterable[Tensor], size: int | None, *, begins: bool = True) -> Iterator[Tensor]:
    """Yield the first frame of a video in pieces, then runs of `size` frames; None: all others.

    Each comes as soon as its frames are there; the last one can be shorter. If the video does not
    begin here, its first frame is like any other.
    """
    held: list[Tensor] = []
    missing: int | None = 1 if begins else size
    for piece in pieces:
        rest = piece
        while missing is not None and rest.shape[2] >= missing:
            yield _join([*held, rest[:, :, :missing]])
            rest = rest[:, :, missing:]
            held, missing = [], size
        if rest.shape[2]:
            held.append(rest)
            missing = None if missing is None else missing - rest.shape[2]
    if held:
        yield _join(held)
