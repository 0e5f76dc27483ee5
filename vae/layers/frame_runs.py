"""A run of frames that comes to rest, on its way through causal layers.

Where a run ends in frames that are alike, the results of a causal layer are alike too, its reach
later. So of every activation only the frames up to the first of those are made, and the layer
behind gets as many copies of the last as its own results need to come to rest.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import new_video
from .workspace import canonical


@dataclass(frozen=True)
class Settling:
    """How many frames of a run need to be looked at.

    Attributes:
        frames: Frames of the run.
        fresh: So many of them, from the first on, need to be known: the others are like the last of
            these. At 0 and less they are like those before the run.
    """

    frames: int
    fresh: int

    @property
    def needed(self) -> int:
        """Frames of the run to be made, or given."""
        return max(0, min(self.fresh, self.frames))

    def behind(self, taps: int, stride: int) -> "Settling":
        """The results of a causal convolution.

        Result `j` sees frames up to `j * stride + stride - 1`, `taps` of them. It is at rest when
        the first of these is.
        """
        first = -(-(self.fresh - 1 + taps - stride) // stride)
        return Settling(self.frames // stride, first + 1)

    def part(self, start: int, frames: int) -> "Settling":
        """Some of its frames."""
        return Settling(frames, self.fresh - start)


def fitted(x: Tensor, frames: int) -> Tensor:
    """The first frames of an activation, and its last again where there are not enough.

    `[B, C, T, H, W]`, of one frame at least, to `[B, C, frames, H, W]`, both channels-last: `x`, a
    view of it, or a copy.
    """
    known = x.shape[2]
    if frames == known:
        return x
    if frames < known:
        return canonical(x[:, :, :frames].contiguous(memory_format=torch.channels_last_3d))
    batch, channels, _, height, width = x.shape
    y = new_video(x, (batch, channels, frames, height, width))
    y[:, :, :known] = x
    y[:, :, known:] = x[:, :, -1:]
    return y


def parts(
    x: Tensor, frames: int, size: int, attempt: Callable[[Callable[[], Tensor]], Tensor]
) -> Iterator[Tensor]:
    """Cut `fitted(x, frames)` into parts without making it.

    Args:
        x: `[B, C, T, H, W]`, channels-last, `T` at most `frames`.
        frames: Frames of all parts.
        size: Frames of each; the last may be shorter.
        attempt: Calls what allocates, such as `TemporalCache.attempt`.

    Yields:
        `[B, C, size, H, W]`, channels-last, to be written into.
    """
    known = x.shape[2]
    last = attempt(x[:, :, -1:].clone) if frames > known else x

    def part(start: int) -> Tensor:
        count = min(size, frames - start)
        if start < known:
            run = fitted(x[:, :, start : start + count], count)
            return run.contiguous(memory_format=torch.channels_last_3d)
        run = last.expand(-1, -1, count, -1, -1)
        return run.clone(memory_format=torch.channels_last_3d)

    for start in range(0, frames, size):
        yield attempt(functools.partial(part, start))


def largest_part(frames: int, nbytes: int, part_bytes: int, *, even: bool = True) -> int:
    """The most frames of an activation of `nbytes` that go on together; 1 where one is too large.

    With `even` all parts have one shape; else the last may be shorter.
    """
    if nbytes <= part_bytes:
        return frames
    most = max(1, part_bytes * frames // nbytes)
    if not even:
        return -(-frames // -(-frames // most))
    return max(part for part in range(1, most + 1) if frames % part == 0)
