"""The pipeline: chunks of frames through a chain of causal layers, depth first.

Nothing but the causal convolutions reads across frames, and each keeps its own tail, so any split
of the frames after the first gives the same result (the first frame takes a path of its own and
stands alone). The steps of a stream are therefore free to be as short as memory and cache like: the
small early layers of a decoder take several latents at a time, the large late ones a frame or two,
and what is done leaves before the next enters.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..layers.causal_layer import CausalLayer
from ..layers.frame_runs import fitted, largest_part, parts
from ..layers.temporal_cache import TemporalCache


def rechunk(
    pieces: Iterable[Tensor],
    size: int | None,
    *,
    begins: bool = True,
    attempt: Callable[[Callable[[], Tensor]], Tensor] = lambda do: do(),
) -> Iterator[Tensor]:
    """Cut a video that comes in pieces into its first frame and runs of `size` frames.

    Args:
        pieces: Tensors `[B, C, t, H, W]`, any `t`, one after the other in time.
        size: Frames per run; None: all that follow the first.
        begins: The first frame is that of the video; else it is like any other.
        attempt: Calls what allocates, such as `Relief.attempt`.

    Yields:
        One frame, then runs of `size`, the last of which may be shorter. A run leaves as soon as
        its frames are there, before the next piece is asked for.
    """
    held: list[Tensor] = []
    missing: int | None = 1 if begins else size
    for piece in pieces:
        rest = piece
        while missing is not None and rest.shape[2] >= missing:
            yield attempt(functools.partial(_join, [*held, rest[:, :, :missing]]))
            rest = rest[:, :, missing:]
            held, missing = [], size
        if rest.shape[2]:
            held.append(rest)
            missing = None if missing is None else missing - rest.shape[2]
    if held:
        yield attempt(functools.partial(_join, held))


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
                waiting.append((at, parts(y, layer.wants(y.shape[2]), part, cache.attempt)))
            elif last:
                yield y
            else:
                done.append(y)
            y = None  # let go of it before the next part is made
            at, y = _next_part(waiting)
            ready = True
        if not last:
            joined, at = cache.attempt(functools.partial(_join, done)), 0


def _cut(layer: CausalLayer, x: Tensor, part_bytes: int) -> int:
    """The frames of a part of `x` that a layer is to get at once; 0: all of them."""
    frames = layer.wants(x.shape[2])
    nbytes = x.nbytes // x.shape[2] * frames * layer.growth
    part = largest_part(frames, nbytes, part_bytes, even=not layer.repeats)
    return part if part < frames else 0


def _fitted(layer: CausalLayer, x: Tensor, cache: TemporalCache) -> Tensor:
    """As many frames as the layer is to get, where those of `x` have come."""
    frames = layer.wants(x.shape[2])
    return x if frames == x.shape[2] else cache.attempt(lambda: fitted(x, frames))


def _next_part(waiting: list[tuple[int, Iterator[Tensor]]]) -> tuple[int, Tensor | None]:
    """The next part of what was cut last, and the layer that it is for; None: all have gone."""
    while waiting:
        at, runs = waiting[-1]
        for part in runs:
            return at, part
        waiting.pop()
    return 0, None


def _join(runs: list[Tensor]) -> Tensor:
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim=2)
