"""A video in pieces of any length, cut into its first frame and equal runs."""

import functools
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from .executor import join


def rechunk(
    pieces: Iterable[Tensor],
    size: int | None,
    *,
    begins: bool = True,
    attempt: Callable[[Callable[[], Tensor]], Tensor] = lambda do: do(),
) -> Iterator[Tensor]:
    """Cut a video in pieces into its first frame and runs of equal length.

    Args:
        pieces: `[B, C, t, H, W]` each, any `t`, in order of time.
        size: Frames per run; None: all frames after the first.
        begins: The first frame is the start of the video; otherwise it is like any other.
        attempt: Runs an allocation, such as `Relief.attempt`.

    Yields:
        One frame, then runs of `size` frames, the last of which can be shorter. A run is yielded as
        soon as its frames are there, before the next piece is requested.
    """
    held: list[Tensor] = []
    missing: int | None = 1 if begins else size
    for piece in pieces:
        rest = piece
        while missing is not None and rest.shape[2] >= missing:
            yield attempt(functools.partial(join, [*held, rest[:, :, :missing]]))
            rest = rest[:, :, missing:]
            held, missing = [], size
        if rest.shape[2]:
            held.append(rest)
            missing = None if missing is None else missing - rest.shape[2]
    if held:
        yield attempt(functools.partial(join, held))
