"""The causal convolution: 3D over its window of frames, cut down to 2D for a first one."""

import functools
from typing import Protocol

import torch
from torch import Tensor

from ...kernels import is_out_of_memory
from . import row_bands
from .causal_layer import CausalLayer
from .conv import BIAS, Conv, Terms
from .frame_runs import Settling, fitted
from .temporal_cache import TemporalCache

# Where a frame does not fit at once: bands of rows, so many.
_BANDS = 4


class Fill(Protocol):
    """Writes a function of its first argument into `out`, such as a norm.

    With `tail` it writes the frames of that before it, and then brings the tail up to date.
    """

    def __call__(self, x: Tensor, *, out: Tensor, tail: Tensor | None = None) -> object:
        """Write it."""


class CausalConv3d(Conv, CausalLayer):
    """A 3D convolution that sees the frame and the past alone.

    `CausalConv3d` of Wan 2.1, wan/modules/vae.py: the video is padded with zero frames in front
    only. Here the padding is the tail of the frames before, written once together with the new
    frames; the spatial padding stays in the convolution. The first frame of a video meets only the
    last temporal tap, so it runs as a 2D convolution.

    With `replicate` the first frame itself stands before the video, as in SeedVR2
    (models/video_vae_v3/modules/causal_inflation_lib.py): it meets the sum of the temporal taps.

    Args:
        in_channels: Channels in.
        out_channels: Channels out.
        kernel: Taps in (time, height, width); height and width are equal and odd.
        stride: Frames per step; with 2, the frames come in pairs after the first.
        replicate: Copies of the first frame stand before it, not zeros.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, int, int] = (3, 3, 3),
        stride: int = 1,
        *,
        replicate: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel)
        self.stride = stride
        self.replicate = replicate
        self.context = kernel[0] - stride
        self.first_form = "summed" if replicate else "frame"
        self.padding = kernel[1] // 2
        self.growth = max(1, out_channels // in_channels)

    def forward(
        self,
        x: Tensor,
        cache: TemporalCache,
        fill: Fill | None = None,
        terms: Terms = BIAS,
    ) -> Tensor:
        """Convolve `fill(x)`, causally.

        Args:
            x: `[B, C_in, T, H, W]`, channels-last; one frame where the cache says that it is the
                first.
            cache: Gives the frames before `x`, and keeps the last of them.
            fill: Computed on the way into the convolution's input, such as a norm.
            terms: What is added; a residual is `[B, C_out, T, H, W]`.

        Returns:
            `[B, C_out, T / stride, H, W]`, channels-last. Of a run that comes to rest (see
            `cache.settling`) as many frames as it takes, which without a residual may be none.
        """
        if cache.settling is not None and not cache.first:
            return self._settled(cache.settling, x, cache, fill, terms)
        window: Tensor | None = None
        try:
            window = self._window(x, cache, fill)
            if cache.first and not cache.lone and self.context:
                self.tail(x, cache)  # for `keep`, which must not fail any more
            y = self.of_window(window, cache, self.padding, terms)
        except Exception as error:
            relief = cache.workspace.relief
            if relief is None or not is_out_of_memory(error):
                raise
            failed = error.with_traceback(None)
            relief.note("convolutions in smaller pieces")
        else:
            if cache.first:
                self.keep(window, cache)
            return y
        # Out of the except block, because the error holds the tensors of its frames.
        if window is not None and not cache.first:
            cache.put_back(self, window[:, :, : self.context])
        del window
        return self._in_pieces(failed, x, cache, fill, terms)

    def _in_pieces(
        self,
        failed: Exception,
        x: Tensor,
        cache: TemporalCache,
        fill: Fill | None,
        terms: Terms,
    ) -> Tensor:
        """`forward` for half of the frames and then the rest; for a frame alone, in bands of rows.

        Raises:
            Exception: `failed`, where nothing smaller is to be had.
        """
        half = x.shape[2] // (2 * self.stride) * self.stride
        if half:
            pieces = []
            for part in (slice(0, half), slice(half, None)):
                steps = slice(*(at and at // self.stride for at in (part.start, part.stop)))
                added = terms.of(functools.partial(_run, cache, steps))
                pieces.append(self.forward(_run(cache, part, x), cache, fill, added))
            return cache.attempt(lambda: torch.cat(pieces, dim=2))
        rows = x.shape[3] // _BANDS
        if not rows or self.replicate:  # the norm before that of SeedVR2 sees the whole frame
            raise failed
        take = _copy if fill is None else fill
        return row_bands.convolve(self, take, x, cache, rows, terms)

    def _settled(
        self,
        settling: Settling,
        x: Tensor,
        cache: TemporalCache,
        fill: Fill | None,
        terms: Terms,
    ) -> Tensor:
        """`forward` of a run that comes to rest."""
        cache.settling = settling = settling.behind(self.weight.shape[2], self.stride)
        frames = settling.needed if terms.residual is None else max(1, settling.needed)
        if not frames:
            batch, _, _, height, width = x.shape
            none = (batch, self.weight.shape[0], 0, height, width)
            return cache.attempt(functools.partial(x.new_empty, none))
        terms = terms.of(lambda residual: cache.attempt(lambda: fitted(residual, frames)))
        window = self._window(x, cache, fill, frames * self.stride)
        return self.of_window(window, cache, self.padding, terms)

    def of_window(
        self,
        window: Tensor,
        cache: TemporalCache,
        rows: int,
        terms: Terms = BIAS,
    ) -> Tensor:
        """Convolve frames with those before them: all taps, or a first frame in its own form.

        It fails before it writes into a residual, or not at all.

        Args:
            window: `[B, C_in, T, H, W]`: one first frame, or those before the new ones and these.
            cache: The state of the video.
            rows: Rows of zeros above and below; 0 for a band that has its borders.
            terms: As for `forward`.

        Returns:
            `[B, C_out, T', H - 2 * (padding - rows), W]`.
        """
        pads = (rows, self.padding)
        if not cache.first:
            return self.convolve(window, "volume", (self.stride, 1, 1), pads, cache, terms)
        frame, added = window.squeeze(2), terms.of(lambda residual: residual.squeeze(2))
        return self.convolve(frame, self.first_form, (1, 1), pads, cache, added).unsqueeze(2)

    def _window(
        self, x: Tensor, cache: TemporalCache, fill: Fill | None, frames: int | None = None
    ) -> Tensor:
        """The frames that it saw last, and the new ones: `[B, C_in, context + T, H, W]`.

        Of a first frame that alone. The tail is up to date afterwards, but for a first frame's, or
        as it was where this fails. With `frames` the new ones are so many of `x`, whose last one,
        or that before it, is repeated.
        """
        if fill is not None and (cache.first or torch.is_grad_enabled()):
            filled = cache.scratch(x.shape, x)
            cache.attempt(functools.partial(fill, x, out=filled))
            x, fill = filled, None
        if cache.first:
            return x
        if fill is None and frames is None:
            return cache.window(self, self.context, x)
        new = x if frames is None else x[:, :, :frames]
        batch, channels, fresh, height, width = new.shape
        frames = fresh if frames is None else frames
        window = cache.scratch((batch, channels, self.context + frames, height, width), new)
        known = self.context + fresh
        if fill is not None and fresh:
            inner = window[:, :, :known]
            # The tail is looked up by each try, because making room may have moved it.
            cache.attempt(lambda: fill(new, out=inner, tail=self.tail(new, cache)))
        else:
            window[:, :, : self.context] = self.tail(new, cache)
            window[:, :, self.context : known] = new
        window[:, :, known:] = window[:, :, known - 1 : known]
        if fill is None or fresh < frames:
            self.tail(new, cache).copy_(window[:, :, frames:])
        return window

    def tail(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """The frames before `x` that it saw; see `TemporalCache.tail`."""
        return cache.tail(self, self.context, x)

    def keep(self, x: Tensor, cache: TemporalCache) -> None:
        """Remember frames that it saw, or that passed by without being convolved."""
        if cache.first and self.replicate and self.context:
            x = x.expand(-1, -1, self.context, -1, -1)
        cache.keep(self, self.context, x)


def _run(cache: TemporalCache, frames: slice, x: Tensor) -> Tensor:
    """Some frames of `x`, channels-last."""
    run = x[:, :, frames]
    return cache.attempt(lambda: run.contiguous(memory_format=torch.channels_last_3d))


def _copy(x: Tensor, *, out: Tensor) -> None:
    out.copy_(x)
