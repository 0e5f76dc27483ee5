"""Frames with lines of the neighbours around the part of one rank.

A 3x3 kernel sees one line beyond its part. The lines are exchanged before the layer allocates its
input, so that a shortage of memory on one rank never needs another exchange.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...kernels import new_video
from .lines import FrameShard, Lines
from .temporal_cache import TemporalCache

# Writes the input of a convolution into `out`, see `fill.Fill`; None: a copy.
Write = Callable[..., object] | None


class Halo(NamedTuple):
    """The layout of frames with a halo."""

    dim: int  # The divided dimension of `[B, C, T, H, W]`
    size: int  # Lines on each side

    @property
    def border(self) -> bool:
        """Whether there are rows of zeros too, instead of the padding of the convolution.

        Ops write frames with a border on all sides, or dense ones; columns on two sides would be
        neither.
        """
        return self.dim == 4

    @property
    def pads(self) -> tuple[int, int]:
        """Rows and columns that the convolution pads."""
        return (0, 0) if self.border else (0, self.size)

    def shape(self, inner: Sequence[int]) -> tuple[int, ...]:
        """Return the shape with a halo of frames of shape `inner`, `[B, C, T, H, W]`."""
        return tuple(
            length + 2 * self.size * (3 <= dim <= self.dim) for dim, length in enumerate(inner)
        )

    def like(self, x: Tensor) -> Tensor:
        """Return `x` `[B, C, T, H, W]` in the shape with a halo; its values are of no use."""
        return x[..., :1, :1].expand(self.shape(x.shape))

    def inner(self, frames: Tensor) -> Tensor:
        """Return `frames` `[B, C, T, H, W]` without the halo."""
        for dim in range(3, self.dim + 1):
            frames = frames.narrow(dim, self.size, frames.shape[dim] - 2 * self.size)
        return frames

    def fill(
        self, out: Tensor, x: Tensor, lines: Lines, cache: TemporalCache, write: Write
    ) -> None:
        """Write frames with their halo, whose `lines` are written already."""
        if write is None:
            if self.border:
                out[..., : self.size, :] = 0
                out[..., -self.size :, :] = 0
            self.inner(out).copy_(x)
        elif self.border:
            cache.attempt(functools.partial(write, x, out=out, border=self.size))
        else:
            cache.attempt(functools.partial(write, x, out=self.inner(out)))
        if self.border:
            out = out[..., self.size : -self.size, :]
        ends = 0, out.shape[self.dim] - self.size
        for start, line in zip(ends, lines, strict=True):
            place = out.narrow(self.dim, start, self.size)
            if line is None:
                place.zero_()
            else:
                place.copy_(line)

    def window(
        self,
        x: Tensor,
        lines: Lines,
        cache: TemporalCache,
        write: Write,
        context: int,
        tail: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Write frames behind a tail, both with a halo; return scratch memory and the frames in it.

        `tail` returns the tail for frames like `x` with the halo; None: there is none.
        """
        like, known = self.like(x), 0 if tail is None else context
        batch, channels, frames, height, width = like.shape
        window = cache.scratch((batch, channels, known + frames, height, width), x)
        if tail is not None:
            window[:, :, :known] = tail(like)
        fresh = window[:, :, known:]
        self.fill(fresh, x, lines, cache, write)
        return window, fresh


def halo_of(cache: TemporalCache, size: int) -> Halo | None:
    """Return the layout of a layer that sees `size` lines a side.

    None: frames are whole, or `size` is 0.
    """
    shard = cache.shard
    if shard is None or not size:
        return None
    return Halo(shard.dim, size)


def exchanged(
    shard: FrameShard,
    x: Tensor,
    halo: Halo,
    cache: TemporalCache,
    write: Write = None,
    *,
    before: bool = True,
) -> Lines:
    """Return the lines of the neighbours around `x`, as `write` writes them (None: a copy)."""
    if not x.shape[2]:
        return Lines(None, None)

    def written(start: int) -> Tensor:
        lines = x.narrow(halo.dim, start, halo.size)
        if write is None:
            return lines
        if halo.dim == 4:
            lines = lines.contiguous(memory_format=torch.channels_last_3d)
        out = new_video(lines, tuple(lines.shape))
        write(lines, out=out)
        return out

    first = cache.attempt(functools.partial(written, 0))
    end = x.shape[halo.dim] - halo.size
    last = cache.attempt(functools.partial(written, end)) if before else None
    return shard.exchange(first, last, cache.attempt)


def extended(
    x: Tensor, cache: TemporalCache, *, before: bool = True
) -> tuple[Tensor, tuple[int, int]]:
    """Return frames with one line of each neighbour in scratch memory, and what is padded.

    `x`, not in scratch memory, is returned itself where this process has whole frames. Without
    `before` the line before the part is zeros.
    """
    halo = halo_of(cache, 1)
    if halo is None or cache.shard is None:
        return x, (1, 1)
    lines = exchanged(cache.shard, x, halo, cache, before=before)
    out = cache.scratch(halo.shape(x.shape), x)
    halo.fill(out, x, lines, cache, None)
    return out, halo.pads


def joined(
    conv: nn.Module, context: int, x: Tensor, cache: TemporalCache
) -> tuple[Tensor, tuple[int, int]]:
    """Join tail and new frames, with one line of each neighbour, in scratch memory; keep the tail.

    The tail of a first frame is copies of it. Also return the rows and columns to pad.
    """
    halo = halo_of(cache, 1)
    if halo is None or cache.shard is None:
        raise RuntimeError("the frames are not divided; expected a shard")
    lines = exchanged(cache.shard, x, halo, cache)
    tail = None if cache.first else functools.partial(cache.tail, conv, context)
    window, fresh = halo.window(x, lines, cache, None, context, tail)
    kept = fresh.expand(-1, -1, context, -1, -1) if cache.first else fresh
    cache.keep(conv, context, kept)
    return window, halo.pads
