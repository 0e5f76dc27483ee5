"""Frames with lines of the neighbours around the part of one rank.

A 3x3 kernel sees one line beyond its part. Only lines of new frames are exchanged: tails keep the
lines with their frames.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import new_video
from .lines import FrameShard, Lines
from .temporal_cache import TemporalCache
from .workspace import Fill

# Writes the input of a convolution into `out`, see `Fill`; None: a copy.
Write = Callable[..., object] | None


class Halo(NamedTuple):
    """The layout of frames with a halo."""

    shard: FrameShard
    size: int  # Lines on each side

    @property
    def border(self) -> bool:
        """Whether there are rows of zeros too, instead of the padding of the convolution.

        Ops write frames with a border on all sides, or dense ones; columns on two sides would be
        neither.
        """
        return self.shard.dim == 4

    @property
    def pads(self) -> tuple[int, int]:
        """Rows and columns that the convolution pads."""
        return (0, 0) if self.border else (0, self.size)

    def shape(self, inner: Sequence[int]) -> tuple[int, ...]:
        """Return the shape with a halo of frames of shape `inner`, `[B, C, T, H, W]`."""
        return tuple(
            length + 2 * self.size * (3 <= dim <= self.shard.dim)
            for dim, length in enumerate(inner)
        )

    def like(self, x: Tensor) -> Tensor:
        """Return `x` `[B, C, T, H, W]` in the shape with a halo; its values are of no use."""
        return x[..., :1, :1].expand(self.shape(x.shape))

    def lines(self, x: Tensor, write: Write = None, *, before: bool = True) -> Lines:
        """Return the lines of the neighbours around `x`, as `write` writes them (None: a copy).

        Without `before` there are none before the part.
        """
        if not x.shape[2]:
            return Lines(None, None)

        def written(start: int) -> Tensor:
            lines = x.narrow(self.shard.dim, start, self.size)
            if write is None:
                return lines
            if self.border:
                lines = lines.contiguous(memory_format=torch.channels_last_3d)
            out = new_video(lines, tuple(lines.shape))
            write(lines, out=out)
            return out

        end = x.shape[self.shard.dim] - self.size
        return self.shard.exchange(written(0), written(end) if before else None)

    def fill(self, out: Tensor, x: Tensor, lines: Lines, write: Write = None) -> None:
        """Write frames with their halo, whose `lines` are written already."""
        inner = out
        for dim in range(3, self.shard.dim + 1):
            inner = inner.narrow(dim, self.size, inner.shape[dim] - 2 * self.size)
        if write is None:
            if self.border:
                out[..., : self.size, :] = 0
                out[..., -self.size :, :] = 0
            inner.copy_(x)
        elif self.border:
            write(x, out=out, border=self.size)
        else:
            write(x, out=inner)
        if self.border:
            out = out[..., self.size : -self.size, :]
        ends = 0, out.shape[self.shard.dim] - self.size
        for start, line in zip(ends, lines, strict=True):
            place = out.narrow(self.shard.dim, start, self.size)
            if line is None:
                place.zero_()
            else:
                place.copy_(line)

    def filling(self, x: Tensor, write: Write = None) -> Fill:
        """Exchange the lines around `x`, and return a fill of its first frames with their halo."""
        lines = self.lines(x, write)

        def fill(x: Tensor, *, out: Tensor, tail: Tensor | None = None, border: int = 0) -> None:
            known = 0 if tail is None else tail.shape[2]
            self.fill(out[:, :, known:], x, lines.of(slice(x.shape[2])), write)
            if tail is not None:
                out[:, :, :known] = tail
                tail.copy_(out[:, :, out.shape[2] - known :])

        return fill


def extended(
    x: Tensor, cache: TemporalCache, *, before: bool = True
) -> tuple[Tensor, tuple[int, int]]:
    """Return frames with one line of each neighbour in scratch memory, and what is padded.

    `x`, not in scratch memory, is returned itself where this process has whole frames. Without
    `before` the line before the part is zeros.
    """
    if cache.shard is None:
        return x, (1, 1)
    halo = Halo(cache.shard, 1)
    lines = halo.lines(x, before=before)
    out = cache.scratch(halo.shape(x.shape), x)
    halo.fill(out, x, lines)
    return out, halo.pads
