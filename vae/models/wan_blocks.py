"""The blocks of the Wan layouts: norm, residual, attention, resampling.

Shapes, order and parameter names follow Wan 2.1, wan/modules/vae.py. Every block takes the
activation `[B, C, T, H, W]`, channels-last, and the `TemporalCache` of the video. It may write into
its input. `taps` is the number of temporal taps of a convolution.
"""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...kernels import attention, bias_residual, code_steps, interleave_time, rms_norm_silu
from ..layers.causal_conv import CausalConv3d, StridedConv2d, UpsampleConv2d
from ..layers.causal_layer import CausalLayer
from ..layers.conv import PointwiseConv, Terms
from ..layers.temporal_cache import TemporalCache


class RMSNorm(nn.Module):
    """Wan's norm over the channels of each pixel: a scale, no mean, no bias.

    `gamma` has `ndim` dimensions after the first, as in the checkpoint.
    """

    def __init__(self, channels: int, ndim: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels, *[1] * ndim))

    def silu(
        self,
        x: Tensor,
        *,
        out: Tensor | None = None,
        tail: Tensor | None = None,
        bias: Tensor | None = None,
        border: int = 0,
        codes: Tensor | None = None,
        saturated: Tensor | None = None,
    ) -> Tensor:
        """Compute norm and SiLU of `x`, as `rms_norm_silu` does."""
        options = {"tail": tail, "out": out, "border": border}
        return rms_norm_silu(x, self.gamma, bias=bias, codes=codes, saturated=saturated, **options)

    def steps(self) -> Tensor:
        """Return the step between two codes of each channel of `silu`, `[C]` in float32."""
        return code_steps(self.gamma)

    def scales(self) -> tuple[Tensor, ...]:
        """Return the parameters `[C]` that the steps are derived from."""
        return (self.gamma,)

    def forward(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Compute the norm of `x` `[B, C, T, H, W]`, into `out` if given."""
        return rms_norm_silu(x, self.gamma, silu=False, out=out)


class ResidualBlock(CausalLayer):
    """Norm, SiLU, convolution, twice, added to the input or to its 1x1x1 `shortcut`."""

    settles = True

    def __init__(self, in_channels: int, out_channels: int, taps: int = 3) -> None:
        super().__init__()
        kernel = (taps, 3, 3)
        norm1, norm2 = RMSNorm(in_channels), RMSNorm(out_channels)
        conv1 = CausalConv3d(in_channels, out_channels, kernel)
        conv2 = CausalConv3d(out_channels, out_channels, kernel)
        conv1.follow(norm1)
        conv2.follow(norm2)
        self.residual = nn.ModuleDict({"0": norm1, "2": conv1, "3": norm2, "6": conv2})
        self.shortcut = (
            None if in_channels == out_channels else PointwiseConv(in_channels, out_channels)
        )

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the block on `x` `[B, C_in, T, H, W]` with `cache`; return `[B, C_out, T, H, W]`."""
        norm1, conv1, norm2, conv2 = cast(Any, self.residual.values())
        y, fill = conv1.into(norm2, conv2, x, cache, conv1.filled(norm1.silu, cache))
        if self.shortcut is None:
            return conv2(y, cache, fill, Terms(x))
        return conv2(y, cache, fill, self.shortcut.as_residual(x, conv2.route(x, cache)))


class AttentionBlock(CausalLayer):
    """Single-head self-attention over the pixels of each frame, added to the input."""

    sees_all = True  # every pixel of a frame: no tiles

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, ndim=2)
        self.to_qkv = PointwiseConv(channels, 3 * channels, ndim=2)
        self.proj = PointwiseConv(channels, channels, ndim=2)

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the block on `x` `[B, C, T, H, W]` with `cache`; the shape stays the same."""
        return attend(x, cache, self.norm, lambda y: self.to_qkv(y).chunk(3, 1), self.proj)


class Upsample(CausalLayer):
    """Nearest 2x in space and a 3x3 convolution; with `temporal`, one frame becomes two first.

    The first frame of a video skips `time_conv` and is not part of its history either: the second
    step sees zeros before it (wan/modules/vae.py, the "Rep" branch of `Resample`).
    """

    scale = Fraction(2)

    def __init__(
        self, in_channels: int, out_channels: int, *, temporal: bool, taps: int = 3
    ) -> None:
        super().__init__()
        self.times = 2 if temporal else 1
        # The phases before they are merged.
        self.growth = 4 * out_channels // in_channels * self.times
        self.resample = nn.ModuleDict({"1": UpsampleConv2d(in_channels, out_channels)})
        self.time_conv = (
            CausalConv3d(in_channels, 2 * in_channels, (taps, 1, 1)) if temporal else None
        )

    def forward(self, x: Tensor, cache: TemporalCache, source: Tensor | None = None) -> Tensor:
        """Upsample, and add `source` `[B, C, T, H, W]`, repeated, as `merge_phases` does."""
        if self.time_conv is not None and not cache.first:
            y = self.time_conv(x, cache)
            batch, channels, frames, height, width = x.shape
            out = cache.scratch((batch, channels, 2 * frames, height, width), x)
            x = interleave_time(y, 2, out=out)
        return self.resample["1"](x, cache, source, self.times)


class Downsample(CausalLayer):
    """A 3x3 convolution with stride 2 in space; with `temporal`, two frames become one afterwards.

    The first frame of a video skips `time_conv`, but is the history of its second step.
    """

    scale = Fraction(1, 2)

    def __init__(self, channels: int, *, temporal: bool, taps: int = 3) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": StridedConv2d(channels, channels)})
        self.pairs = temporal
        # With one tap there is no time, and the weights only exist for their names.
        stride = min(2, taps)
        self.time_conv = (
            CausalConv3d(channels, channels, (taps, 1, 1), stride=stride) if temporal else None
        )

    def forward(self, x: Tensor, cache: TemporalCache, residual: Tensor | None = None) -> Tensor:
        """Downsample, and add `residual`, whose memory may become the result."""
        if self.time_conv is None:
            return self.resample["1"](x, cache, Terms(residual))
        x = self.resample["1"](x, cache)
        if not cache.first:
            return self.time_conv(x, cache, terms=Terms(residual))
        self.time_conv.keep(x, cache)
        if residual is None:
            return x
        return bias_residual(x, residual=residual)


class Head(CausalLayer):
    """Norm, SiLU and the last convolution."""

    def __init__(self, in_channels: int, out_channels: int, taps: int = 3) -> None:
        super().__init__()
        self.add_module("0", RMSNorm(in_channels))
        self.add_module("2", CausalConv3d(in_channels, out_channels, (taps, 3, 3)))

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the head on `x` `[B, C_in, T, H, W]` with `cache`; return `[B, C_out, T, H, W]`."""
        norm, conv = self.children()
        return conv(x, cache, fill=norm.silu)


def residual_blocks(
    in_channels: int, out_channels: int, count: int, taps: int = 3
) -> list[ResidualBlock]:
    """Return a chain of residual blocks, of which the first changes the width."""
    widths = [in_channels] + [out_channels] * count
    return [ResidualBlock(*pair, taps) for pair in itertools.pairwise(widths)]


def middle(channels: int, taps: int = 3) -> nn.ModuleList:
    """Return the middle of a network with `channels` and `taps`: residual, attention, residual."""
    first, last = residual_blocks(channels, channels, 2, taps)
    return nn.ModuleList([first, AttentionBlock(channels), last])


def attend(
    x: Tensor,
    cache: TemporalCache,
    norm: Callable[..., Tensor],
    mix: Callable[[Tensor], Sequence[Tensor]],
    proj: nn.Module,
) -> Tensor:
    """Add self-attention over the pixels of each frame to `x`, which is not modified.

    `mix` returns queries, keys and values of normed frames, each in their shape.
    """
    batch, _, frames, height, width = x.shape
    normed = cache.scratch(x.shape, x)
    norm(x, out=normed)
    mixed = mix(normed)
    rows = attention(*(y.movedim(1, -1).flatten(2, 3).flatten(0, 1) for y in mixed))
    y = proj(rows.view(batch, frames, height, width, -1).movedim(-1, 1))
    return bias_residual(y, residual=x, out=y)
