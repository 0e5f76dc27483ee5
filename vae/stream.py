"""The pipeline: chunks of frames through a chain of causal layers, depth first.

Nothing but the causal convolutions reads across frames, and each keeps its own tail, so any split of the frames
after the first gives the same result (the first frame takes a path of its own and stands alone). The steps of a
stream are therefore free to be as short as memory and cache like: the small early layers of a decoder take several
latents at a time, the large late ones a frame or two, and what is done leaves before the next enters.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .cache import TemporalCache
from .wan import Layer


def rechunk(pieces: Iterable[Tensor], size: int | None) -> Iterator[Tensor]:
    """Cut a video that comes in pieces into its first frame and runs of `size` frames.

    Args:
        pieces: Tensors `[B, C, t, H, W]`, any `t`, one after the other in time.
        size: Frames per run; None: all that follow the first.

    Yields:
        One frame, then runs of `size`, the last of which may be shorter. A run leaves as soon as its frames are
        there, before the next piece is asked for.
    """
    held: list[Tensor] = []
    missing: int | None = 1
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


def advance(
    chains: Sequence[Sequence[Layer]], x: Tensor, cache: TemporalCache, limit_bytes: int | None
) -> Iterator[Tensor]:
    """Push one chunk of frames through the network, depth first.

    Args:
        chains: The layers, in runs; between two runs the frames of a chunk come together again, because the next
            layer takes them in groups.
        x: `[B, C, T, H, W]`, channels-last; a single frame while the cache says that it is the first.
        cache: The state of the video.
        limit_bytes: Before an activation grows larger, its frames go on in parts; None: never in parts.

    Yields:
        Runs of frames as they leave the last layer.
    """
    for chain in chains[:-1]:
        x = _join(list(_run(chain, x, cache, limit_bytes)))
    yield from _run(chains[-1], x, cache, limit_bytes)


def _run(layers: Sequence[Layer], x: Tensor, cache: TemporalCache, limit_bytes: int | None) -> Iterator[Tensor]:
    for index, layer in enumerate(layers):
        frames = x.shape[2]
        part = _part(x, limit_bytes)
        if part < frames:
            for start in range(0, frames, part):
                run = x[:, :, start : start + part].contiguous(memory_format=torch.channels_last_3d)
                yield from _run(layers[index:], run, cache, limit_bytes)
            return
        x = layer(x, cache)
    yield x


def _part(x: Tensor, limit_bytes: int | None) -> int:
    """The most frames within the limit that divide the chunk evenly, so that all parts have one shape."""
    frames = x.shape[2]
    if limit_bytes is None or x.nbytes <= limit_bytes:
        return frames
    most = max(1, limit_bytes * frames // x.nbytes)
    return max(part for part in range(1, most + 1) if frames % part == 0)


def _join(runs: list[Tensor]) -> Tensor:
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim=2)
