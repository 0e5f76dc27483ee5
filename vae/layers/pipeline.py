"""The pipeline of a network: a chunk of frames, pushed depth first through causal layers.

Steps are as short as memory and cache require: the small early layers of a decoder take several
latents at a time, the large late ones a frame or two, and finished frames leave before the next
part starts.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .causal_layer import CausalLayer
from .frame_runs import fitted, largest_part, parts
from .temporal_cache import TemporalCache

# Larger than any activation, so that no frames are divided.
_WHOLE = 1 << 62


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
            joined, at = joined_runs(done), 0


def _cut(layer: CausalLayer, x: Tensor, part_bytes: int) -> int:
    """Return the frames of a part of `x` for a layer; 0: all of them."""
    frames = _wanted(layer, x)
    nbytes = x.nbytes // x.shape[2] * frames * layer.growth
    if nbytes <= part_bytes:
        return 0
    part = largest_part(frames, nbytes, part_bytes, even=not layer.repeats)
    return part if part < frames else 0


def _fitted(layer: CausalLayer, x: Tensor) -> Tensor:
    return fitted(x, _wanted(layer, x))


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


def joined_runs(runs: list[Tensor]) -> Tensor:
    """Return `runs` `[B, C, T, H, W]` joined in time."""
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim=2)
