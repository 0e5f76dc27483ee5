"""A norm and its convolution in bands of rows, where whole frames need too much memory.

A tile is never exact under a norm over the frame, but a band is: it uses the statistics of the
whole frame, and has one more row on either side for the convolution, zeros outside the picture.
Only the convolution's input is computed band by band, the tail included; it is the largest buffer
of a layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels import zero_of
from .conv import BIAS, Terms
from .temporal_cache import TemporalCache

# A `CausalConv3d`, whose module imports this one.
SplitConv = Any

# Bands are used for frames of at least this many times the size of a band, because they are slower.
WORTH_IT = 4


def rows_of(conv: SplitConv, x: Tensor, cache: TemporalCache) -> int:
    """Return the rows of a band of about `cache.band_bytes`; the height of an undivided `x`."""
    batch, channels, frames, height, width = x.shape
    if cache.band_bytes is None or cache.shard is not None:
        return height
    frames += 0 if cache.first else conv.context
    row_bytes = max(1, batch * channels * frames * width * x.element_size())
    if row_bytes * height <= WORTH_IT * cache.band_bytes:
        return height
    return max(1, cache.band_bytes // row_bytes - 2 * conv.padding)


def convolve(
    conv: SplitConv,
    fill: Callable[..., object],
    x: Tensor,
    cache: TemporalCache,
    rows: int,
    terms: Terms = BIAS,
) -> Tensor:
    """Convolve `fill(x)` causally, some rows at a time; a residual may become the result.

    `fill` writes the norm and SiLU of some rows, with the statistics of whole frames.
    """
    batch, _, frames, height, width = x.shape
    out = terms.residual
    if out is None:
        shape = (batch, conv.weight.shape[0], frames // conv.stride, height, width)
        one = functools.partial(x.new_empty, (), dtype=terms.dtype)
        out = cache.result(shape, x if x.is_floating_point() else cache.attempt(one))
    keeps = _Tail(conv, x, cache)
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        window = keeps.window(top, bottom)
        above, below = max(0, top - conv.padding), min(height, bottom + conv.padding)
        inner = slice(above - top + conv.padding, below - top + conv.padding)
        fresh = window[:, :, window.shape[2] - frames :, inner, keeps.columns]
        _write(fill, x[:, :, :, above:below], fresh, cache)
        keeps.remember(window, top, bottom)
        pads = 0, conv.padding - keeps.side
        added = terms.of(functools.partial(_band, rows=slice(top, bottom), cache=cache))
        out[:, :, :, top:bottom] = conv.of_window(window, cache, pads, added)
    keeps.finish()
    return out


def _write(fill: Callable[..., object], x: Tensor, out: Tensor, cache: TemporalCache) -> None:
    """Write `fill(x)` into `out`, of the same shape: through a copy if it is not of whole rows."""
    dense = out
    if out.stride(3) != out.shape[4] * out.stride(4):
        order = torch.channels_last_3d
        dense = cache.attempt(functools.partial(torch.empty_like, out, memory_format=order))
    cache.attempt(functools.partial(fill, x, out=dense))
    if dense is not out:
        out.copy_(dense)


def _band(x: Tensor, rows: slice, cache: TemporalCache) -> Tensor:
    """Return a copy of some rows of `x` `[B, C, T, H, W]`, channels-last."""
    part = x[:, :, :, rows]
    return cache.attempt(lambda: part.clone(memory_format=torch.channels_last_3d))


class _Tail:
    """The tail of a convolution while it is replaced band by band.

    A band needs the old last rows of the band above, so their replacement is delayed until it has
    read them.
    """

    def __init__(self, conv: SplitConv, x: Tensor, cache: TemporalCache) -> None:
        self._conv, self._x, self._cache = conv, x, cache
        self._known = 0 if cache.first else conv.context
        self._keeps = bool(conv.context) and not cache.single_frame
        if self._keeps:
            self._tail()
        self._waiting: tuple[slice, Tensor] | None = None
        # The convolution of codes does not pad.
        self._like = conv.like(x, cache)
        self.side = 0 if self._like.is_floating_point() else conv.padding
        self.columns = slice(self.side, self.side + x.shape[4])

    def _tail(self) -> Tensor:
        """Return the tail; looked up each time, because freeing memory may have moved it."""
        return self._conv.tail(self._x, self._cache)

    def window(self, top: int, bottom: int) -> Tensor:
        """Return the input buffer of a band, with the tail and zeros at the border."""
        batch, channels, frames, height, width = self._x.shape
        pad = self._conv.padding
        rows, zero = bottom - top + 2 * pad, zero_of(self._like.dtype)
        shape = (batch, channels, self._known + frames, rows, width + 2 * self.side)
        window = self._cache.scratch(shape, self._like)
        above, below = max(0, top - pad), min(height, bottom + pad)
        first, last = above - top + pad, below - top + pad
        if self.side:
            window.fill_(zero)
        window[:, :, :, :first] = zero
        window[:, :, :, last:] = zero
        if self._known:
            window[:, :, : self._known, first:last, self.columns] = self._tail()[
                :, :, :, above:below
            ]
        self.finish()
        return window

    def remember(self, window: Tensor, top: int, bottom: int) -> None:
        """Keep the last frames of a band that is filled."""
        if not self._keeps:
            return
        pad, context = self._conv.padding, self._conv.context
        last = window[:, :, -context:, pad : pad + bottom - top, self.columns]
        frames = self._cache.attempt(last.expand(-1, -1, context, -1, -1).clone)
        if self._cache.first and not self._conv.replicate:
            # Zeros precede the first frame. `F.pad` over time is wrong on Apple (65,536 pixels).
            frames[:, :, :-1] = zero_of(last.dtype)
        self._waiting = slice(top, bottom), frames

    def finish(self) -> None:
        """Write the delayed rows to the tail."""
        if self._waiting is not None:
            rows, frames = self._waiting
            self._tail()[:, :, :, rows] = frames
            self._waiting = None
