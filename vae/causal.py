"""The causal convolution: 3D over its window of frames, cut down to 2D for a first one."""

from typing import Protocol

import torch
from torch import Tensor

from .cache import TemporalCache
from .conv import Conv


class Fill(Protocol):
    """Writes a function of its first argument into `out`, such as a norm.

    With `tail` it writes the frames of that before it, and then brings the tail up to date.
    """

    def __call__(self, x: Tensor, *, out: Tensor, tail: Tensor | None = None) -> object:
        """Write it."""


class CausalConv3d(Conv):
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

    Attributes:
        context: Frames that it looks back.
        first_form: The form that a first frame is convolved with.
        growth: How many times as large as its input its output is, at least 1.
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
        residual: Tensor | None = None,
        residual_bias: Tensor | None = None,
        *,
        biased: bool = True,
    ) -> Tensor:
        """Convolve `fill(x)`, causally.

        Args:
            x: `[B, C_in, T, H, W]`, channels-last; one frame where the cache says that it is the
                first.
            cache: Gives the frames before `x`, and keeps the last of them.
            fill: Computed on the way into the convolution's input, such as a norm.
            residual: `[B, C_out, T, H, W]`, added to the result; its memory may become the result.
            residual_bias: `C_out` numbers that `residual` still lacks.
            biased: Add the bias too. Without, where `adds_bias_late` says so, the caller adds it.

        Returns:
            `[B, C_out, T / stride, H, W]`, channels-last.
        """
        if cache.first:
            if fill is not None:
                filled = cache.scratch(x.shape, x)
                fill(x, out=filled)
                x = filled
            self.keep(x, cache)
            frame = None if residual is None else residual.squeeze(2)
            y = self._convolve(
                x.squeeze(2),
                self.first_form,
                (1, 1),
                (self.padding, self.padding),
                cache,
                frame,
                residual_bias,
                biased=biased,
            )
            return y.unsqueeze(2)
        return self._convolve(
            self._window(x, cache, fill),
            "volume",
            (self.stride, 1, 1),
            (self.padding, self.padding),
            cache,
            residual,
            residual_bias,
            biased=biased,
        )

    def of_window(self, window: Tensor, cache: TemporalCache) -> Tensor:
        """Convolve a band of rows that has its borders above and below, and its frames before.

        Args:
            window: `[B, C_in, T, H, W]`: one first frame, or those before the new ones and these.
            cache: The state of the video.

        Returns:
            `[B, C_out, T', H - 2 * padding, W]`.
        """
        pads = (0, self.padding)
        if cache.first:
            frame = window.squeeze(2)
            return self._convolve(frame, self.first_form, (1, 1), pads, cache).unsqueeze(2)
        return self._convolve(window, "volume", (self.stride, 1, 1), pads, cache)

    def _window(self, x: Tensor, cache: TemporalCache, fill: Fill | None) -> Tensor:
        """The frames that it saw last, and the new ones: `[B, C_in, context + T, H, W]`."""
        if fill is None:
            return cache.window(self, self.context, x)
        if torch.is_grad_enabled():
            filled = cache.scratch(x.shape, x)
            fill(x, out=filled)
            return cache.window(self, self.context, filled)
        batch, channels, frames, height, width = x.shape
        window = cache.scratch((batch, channels, self.context + frames, height, width), x)
        fill(x, out=window, tail=cache.tail(self, self.context, x))
        return window

    def keep(self, x: Tensor, cache: TemporalCache) -> None:
        """Remember frames that it saw, or that passed by without being convolved."""
        if cache.first and self.replicate and self.context:
            x = x.expand(-1, -1, self.context, -1, -1)
        cache.keep(self, self.context, x)
