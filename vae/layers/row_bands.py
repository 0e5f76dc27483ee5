"""A norm and its convolution in bands of rows, where a frame at once takes too much memory.

A tile is never exact under a norm over the frame. A band is: the statistics are those of the whole
frame, and each band has a row more at either side for the convolution, zeros beyond the picture.
Only the convolution's input, the frames it saw last among them, is made band by band; it is the
largest of what a layer takes.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .conv import BIAS, Terms
from .temporal_cache import TemporalCache


class BandedConv(Protocol):
    """What of `CausalConv3d` is used here."""

    context: int
    padding: int
    stride: int
    replicate: bool

    @property
    def weight(self) -> Tensor:
        """`[C_out, C_in, T, H, W]`."""
        ...

    def of_window(
        self, window: Tensor, cache: TemporalCache, rows: int, terms: Terms = BIAS
    ) -> Tensor:
        """Convolve frames with those before them; add so many rows of zeros above and below."""
        ...

    def tail(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """The memory of the frames that it saw last."""
        ...


# Bands are a detour, taken from so many times the size of a band on.
WORTH_IT = 4


def rows_of(conv: BandedConv, x: Tensor, cache: TemporalCache) -> int:
    """Rows of a band, whose convolution's input is of about `cache.band_bytes`.

    The height of `x`, `[B, C, T, H, W]`, where it need not be divided.
    """
    batch, channels, frames, height, width = x.shape
    if cache.band_bytes is None or torch.is_grad_enabled():
        return height
    frames += 0 if cache.first else conv.context
    row_bytes = max(1, batch * channels * frames * width * x.element_size())
    if row_bytes * height <= WORTH_IT * cache.band_bytes:
        return height
    return max(1, cache.band_bytes // row_bytes - 2 * conv.padding)


def convolve(
    conv: BandedConv,
    fill: Callable[..., object],
    x: Tensor,
    cache: TemporalCache,
    rows: int,
    terms: Terms = BIAS,
) -> Tensor:
    """Convolve `fill(x)` causally, some rows at a time.

    Args:
        conv: A convolution of one pixel at a time.
        fill: Writes what comes before it for some rows into `out`, such as norm and SiLU; with what
            it needs to know of whole frames.
        x: `[B, C_in, T, H, W]`, channels-last.
        cache: Gives the frames before `x`, and keeps the last of them.
        rows: Of a band.
        terms: What is added; the memory of a residual, `[B, C_out, T, H, W]`, becomes the result.

    Returns:
        `[B, C_out, T, H, W]`, channels-last.
    """
    batch, _, frames, height, width = x.shape
    residual, bias, biased = terms
    out = residual
    if out is None:
        shape = (batch, conv.weight.shape[0], frames // conv.stride, height, width)
        out = cache.result(shape, x)
    added: Tensor | None = None
    if bias is not None:
        added = cache.attempt(lambda: bias.to(x.dtype)).view(-1, 1, 1, 1)
    keeps = _Tail(conv, x, cache)
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        window = keeps.window(top, bottom)
        above, below = max(0, top - conv.padding), min(height, bottom + conv.padding)
        inner = slice(above - top + conv.padding, below - top + conv.padding)
        fresh = window[:, :, window.shape[2] - frames :, inner]
        cache.attempt(functools.partial(fill, x[:, :, :, above:below], out=fresh))
        keeps.remember(window, top, bottom)
        part = out[:, :, :, top:bottom]
        y = conv.of_window(window, cache, 0, Terms(biased=biased))
        if residual is None:
            part.copy_(y)
        else:
            part += y
            if added is not None:
                part += added
    keeps.finish()
    return out


class _Tail:
    """The frames that a convolution saw last, while they are replaced band by band.

    A band still needs the last rows of the one above as they were, so that what replaces these
    waits for it.
    """

    def __init__(self, conv: BandedConv, x: Tensor, cache: TemporalCache) -> None:
        self._conv, self._x, self._cache = conv, x, cache
        self._known = 0 if cache.first else conv.context
        self._keeps = bool(conv.context) and not cache.single_frame
        if self._keeps:
            self._tail()
        self._waiting: tuple[slice, Tensor] | None = None

    def _tail(self) -> Tensor:
        """The tail; looked up each time, because making room may have moved it."""
        return self._conv.tail(self._x, self._cache)

    def window(self, top: int, bottom: int) -> Tensor:
        """Memory for the input of a band: what was seen last is there, and zeros at the border."""
        batch, channels, frames, height, width = self._x.shape
        pad = self._conv.padding
        shape = (batch, channels, self._known + frames, bottom - top + 2 * pad, width)
        window = self._cache.scratch(shape, self._x)
        above, below = max(0, top - pad), min(height, bottom + pad)
        first, last = above - top + pad, below - top + pad
        window[:, :, :, :first].zero_()
        window[:, :, :, last:].zero_()
        if self._known:
            window[:, :, : self._known, first:last] = self._tail()[:, :, :, above:below]
        self.finish()
        return window

    def remember(self, window: Tensor, top: int, bottom: int) -> None:
        """Keep the last frames of a band that is filled."""
        if not self._keeps:
            return
        pad, context = self._conv.padding, self._conv.context
        last = window[:, :, -context:, pad : pad + bottom - top]
        if self._cache.first and not self._conv.replicate:
            # Before a first frame there are zeros.
            frames = self._cache.attempt(lambda: F.pad(last, (0, 0, 0, 0, context - 1, 0)))
        else:
            frames = self._cache.attempt(last.expand(-1, -1, context, -1, -1).clone)
        self._waiting = slice(top, bottom), frames

    def finish(self) -> None:
        """Put what waits into its place."""
        if self._waiting is not None:
            rows, frames = self._waiting
            self._tail()[:, :, :, rows] = frames
            self._waiting = None
