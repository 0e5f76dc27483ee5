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
    chain, index = start
    layers = chains[chain][index:]
    if (chain and not index) or (layers and layers[0].pairs):
        x, layers = _through(layers[0], x, cache), layers[1:]
    runs = _run(layers, x, cache, part_bytes)
    for head, *tail in chains[chain + 1 :]:
        joined = cache.attempt(functools.partial(_join, list(runs)))
        runs = _run(tail, _through(head, joined, cache), cache, part_bytes)
    yield from runs


def _run(
    layers: Sequence[CausalLayer], x: Tensor, cache: TemporalCache, part_bytes: int
) -> Iterator[Tensor]:
    for index, layer in enumerate(layers):
        frames = layer.wants(x.shape[2])
        nbytes = x.nbytes // x.shape[2] * frames * layer.growth
        part = largest_part(frames, nbytes, part_bytes, even=not layer.repeats)
        if part < frames:
            for run in parts(x, frames, part, cache.attempt):
                yield from _run(layers[index + 1 :], _called(layer, run, cache), cache, part_bytes)
            return
        x = _through(layer, x, cache)
    yield x


def _through(layer: CausalLayer, x: Tensor, cache: TemporalCache) -> Tensor:
    frames = layer.wants(x.shape[2])
    return _called(layer, cache.attempt(lambda: fitted(x, frames)), cache)


def _called(layer: CausalLayer, x: Tensor, cache: TemporalCache) -> Tensor:
    y = layer(x, cache)
    if cache.thrifty:
        cache.park()
    return y


def _join(runs: list[Tensor]) -> Tensor:
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim=2)
