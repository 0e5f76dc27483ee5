"""Runs of frames with a static end, on their way through causal layers.

If a run ends in identical frames, the results of a causal layer are identical too, after its reach.
So only the frames before that are computed, and the next layer gets as many copies of the last one
as it needs until its own results are static.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import new_video
from .workspace import canonical


@dataclass(frozen=True)
class Settling:
    """The frames of a run until it is static.

    The frames after the first `fresh` are copies of the last of these; if it is 0 or less, of the
    frame before the run.
    """

    frames: int
    fresh: int

    @property
    def needed(self) -> int:
        """Frames of the run that must be computed."""
        return max(0, min(self.fresh, self.frames))

    def behind(self, taps: int, stride: int) -> "Settling":
        """Return the run after a causal convolution with `taps` and `stride`.

        Result `j` sees `taps` frames up to `j * stride + stride - 1`. It is static once the first
        of these is.
        """
        first = -(-(self.fresh - 1 + taps - stride) // stride)
        return Settling(self.frames // stride, first + 1)

    def part(self, start: int, frames: int) -> "Settling":
        """Return the part of the run with `frames` frames from `start` on."""
        return Settling(frames, self.fresh - start)


def fitted(x: Tensor, frames: int) -> Tensor:
    """Return the first `frames` frames of `x`, with its last frame repeated if it has fewer."""
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


def parts(x: Tensor, frames: int, size: int) -> Iterator[Tensor]:
    """Yield `fitted(x, frames)` in parts, which the caller may overwrite; it is never whole."""
    known = x.shape[2]
    last = x[:, :, -1:].clone() if frames > known else x
    for start in range(0, frames, size):
        count = min(size, frames - start)
        if start < known:
            run = fitted(x[:, :, start : start + count], count)
            yield run.contiguous(memory_format=torch.channels_last_3d)
        else:
            run = last.expand(-1, -1, count, -1, -1)
            yield run.clone(memory_format=torch.channels_last_3d)


def largest_part(frames: int, nbytes: int, part_bytes: int, *, even: bool = True) -> int:
    """Return the most frames of an activation that fit into a part; equal parts if `even`."""
    if nbytes <= part_bytes:
        return frames
    most = max(1, part_bytes * frames // nbytes)
    if not even:
        return -(-frames // -(-frames // most))
    return max(part for part in range(1, most + 1) if frames % part == 0)
