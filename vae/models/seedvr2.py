"""Encoder and decoder of SeedVR2: group norms per frame, replicated first frames, pixel shuffles.

The graph and the parameter names are those of SeedVR, models/video_vae_v3 (attn_video_vae.py,
causal_inflation_lib.py, s8_c16_t4_inflation_sd3.yaml). Norms and attention see one frame at a time,
and the video is padded with its first frame, so any split of the stream is exact.
"""

import functools
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...kernels import WeightForm, code_steps, group_norm_silu, group_norm_statistics
from ..layers import row_bands
from ..layers.causal_conv import CausalConv3d
from ..layers.causal_layer import CausalLayer
from ..layers.conv import PointwiseConv, Terms
from ..layers.subpixel_conv import ShuffleConv
from ..layers.temporal_cache import TemporalCache
from .base import Network, in_order
from .config import SEEDVR2_GROUPS
from .wan_blocks import attend

_ENCODER_BLOCKS, _DECODER_BLOCKS = 2, 3
# A convolution of 3 x 3 x 3 with a replicated first frame.
causal = functools.partial(CausalConv3d, replicate=True)


class GroupNorm(nn.Module):
    """A norm over the pixels of each frame and each of 32 groups of channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))

    def silu(self, x: Tensor, **options: Any) -> Tensor:  # noqa: ANN401, those of the op
        """Compute norm and SiLU as `group_norm_silu` does with `options`."""
        return group_norm_silu(x, self.weight, self.bias, SEEDVR2_GROUPS, **options)

    def steps(self) -> Tensor:
        """Return the step between two codes of each channel of `silu`, `[C]` in float32."""
        return code_steps(self.weight, self.bias)

    def scales(self) -> tuple[Tensor, ...]:
        """Return the parameters `[C]` that the steps are derived from."""
        return self.weight, self.bias

    def forward(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Compute the norm of `x` `[B, C, T, H, W]`, into `out` if given."""
        return self.silu(x, silu=False, out=out)


def normed(
    conv: CausalConv3d,
    norm: GroupNorm,
    x: Tensor,
    cache: TemporalCache,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute norm, SiLU and convolution; add a residual, whose memory may become the result."""
    rows, terms = row_bands.rows_of(conv, x, cache), Terms(residual, dtype=x.dtype)
    if rows == x.shape[3]:
        return conv(x, cache, conv.filled(norm.silu, cache), terms)
    # Of whole frames, before they are cut into rows.
    measured = functools.partial(norm.silu, statistics=group_norm_statistics(x, SEEDVR2_GROUPS))
    fill = conv.filled(measured, cache)
    return row_bands.convolve(conv, fill, x, cache, rows, terms)


class SeedVR2ResidualBlock(CausalLayer):
    """Norm, SiLU, convolution, twice, added to the input or to its 1x1x1 `conv_shortcut`."""

    sees_all = True

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(in_channels)
        self.conv1 = causal(in_channels, out_channels)
        self.norm2 = GroupNorm(out_channels)
        self.conv2 = causal(out_channels, out_channels)
        self.conv1.follow(self.norm1)
        self.conv2.follow(self.norm2)
        self.conv_shortcut = (
            None if in_channels == out_channels else PointwiseConv(in_channels, out_channels)
        )

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the block on `x` `[B, C_in, T, H, W]` with `cache`; return `[B, C_out, T, H, W]`."""
        y = normed(self.conv1, self.norm1, x, cache)
        residual = x if self.conv_shortcut is None else self.conv_shortcut(x)
        return normed(self.conv2, self.norm2, y, cache, residual)


class SeedVR2AttentionBlock(CausalLayer):
    """Single-head self-attention over the pixels of each frame, added to the input."""

    sees_all = True

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.group_norm = GroupNorm(channels)
        self.to_q, self.to_k, self.to_v = (PointwiseConv(channels, channels, 0) for _ in range(3))
        self.to_out = nn.ModuleList([PointwiseConv(channels, channels, 0)])

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the block on `x` `[B, C, T, H, W]` with `cache`; the shape stays the same."""
        parts = self.to_q, self.to_k, self.to_v
        return attend(x, cache, self.group_norm, lambda y: [p(y) for p in parts], self.to_out[0])


class SeedVR2Upsample(CausalLayer):
    """A 1x1x1 convolution, a shuffle of its channels to pixels and frames, and a 3x3x3 convolution.

    With `temporal` one frame becomes two, except for the first latent of a video.
    """

    scale = Fraction(2)

    def __init__(self, channels: int, *, temporal: bool) -> None:
        super().__init__()
        self.times = 2 if temporal else 1
        self.growth = 4 * self.times
        self.upscale_conv = PointwiseConv(channels, self.growth * channels)
        self.conv = ShuffleConv(channels, self.upscale_conv, self.times)

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Upsample `x` `[B, C, T, H, W]` with `cache` to `[B, C, T or 2 T, 2 H, 2 W]`."""
        return self.conv(x, cache)


class SeedVR2Downsample(CausalLayer):
    """A convolution with stride 2 in height and width, and in time with `temporal`."""

    scale = Fraction(1, 2)

    def __init__(self, channels: int, *, temporal: bool) -> None:
        super().__init__()
        self.conv = ShrinkingConv3d(channels, temporal=temporal)
        self.pairs = temporal

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Downsample `x` `[B, C, T, H, W]` with `cache` to `[B, C, T or T / 2, H / 2, W / 2]`."""
        return self.conv(x, cache)


class ShrinkingConv3d(CausalConv3d):
    """A causal convolution with stride 2 in space, zero-padded at the right and bottom only."""

    def __init__(self, channels: int, *, temporal: bool) -> None:
        taps, stride = (3, 2) if temporal else (1, 1)
        super().__init__(channels, channels, (taps, 3, 3), stride, replicate=True)

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Convolve `x` `[B, C, T, H, W]` with `cache` to `[B, C, T / stride, H / 2, W / 2]`."""
        window = self._bordered(x, cache)
        kind, stride = ("summed", 1) if cache.first else ("volume", self.stride)
        route = self.routed(WeightForm(kind, x.dtype), (stride, 2, 2), cache)
        return self.convolve(window, route, (0, 0), cache)

    def _bordered(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Join the tail, the new frames, and a row and a column of zeros; keep the tail."""
        batch, channels, frames, height, width = x.shape
        known = 0 if cache.first else self.context
        window = cache.scratch((batch, channels, known + frames, height + 1, width + 1), x)
        window[..., height, :].zero_()
        window[..., width].zero_()
        inner = window[..., :height, :width]
        inner[:, :, known:] = x
        if known:
            inner[:, :, :known] = self.tail(x, cache)
        self.keep(x, cache)
        return window


def _residual_blocks(in_channels: int, out_channels: int, count: int) -> nn.ModuleList:
    widths = [in_channels] + [out_channels] * count
    return nn.ModuleList(SeedVR2ResidualBlock(*pair) for pair in itertools.pairwise(widths))


def _stage(resnets: nn.ModuleList, name: str, *others: CausalLayer) -> nn.ModuleDict:
    """Return the modules of a stage, its residual blocks and others, under their names."""
    named = {name: nn.ModuleList(others)} if others else {}
    return nn.ModuleDict({"resnets": resnets, **named})


def _middle(channels: int) -> nn.ModuleDict:
    blocks = _residual_blocks(channels, channels, 2)
    return _stage(blocks, "attentions", SeedVR2AttentionBlock(channels))


class SeedVR2Head(CausalLayer):
    """Norm, SiLU and the last convolution, which belong to the network itself by name."""

    sees_all = True

    def __init__(self, norm: GroupNorm, conv: CausalConv3d) -> None:
        super().__init__()
        self.norm, self.conv = norm, conv

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the head on `x` `[B, C_in, T, H, W]` with `cache`; return `[B, C_out, T, H, W]`."""
        return normed(self.conv, self.norm, x, cache)


class SeedVR2Encoder(Network):
    """Encode frames to mean and log-variance."""

    def __init__(self, widths: Sequence[int], in_channels: int, latent_channels: int) -> None:
        super().__init__()
        self.conv_in = causal(in_channels, widths[0])
        self.down_blocks = nn.ModuleList()
        for stage, (before, after) in enumerate(itertools.pairwise(widths)):
            blocks = _residual_blocks(before, after, _ENCODER_BLOCKS)
            shrinks = stage < len(widths) - 2
            resamplers = [SeedVR2Downsample(after, temporal=stage > 0)] if shrinks else []
            self.down_blocks.append(_stage(blocks, "downsamplers", *resamplers))
        self.mid_block = _middle(widths[-1])
        self.conv_norm_out = GroupNorm(widths[-1])
        self.conv_out = causal(widths[-1], 2 * latent_channels)

    def layers(self) -> list[CausalLayer]:
        """Return the layers from `[B, C, T, H, W]` to `[B, 2 * C_latent, t, H / 8, W / 8]`."""
        head = SeedVR2Head(self.conv_norm_out, self.conv_out)
        return in_order(self.conv_in, *_parts(self.down_blocks), *_inside(self.mid_block), head)


class SeedVR2Decoder(Network):
    """Decode latents to frames."""

    def __init__(self, widths: Sequence[int], out_channels: int, latent_channels: int) -> None:
        super().__init__()
        self.conv_in = causal(latent_channels, widths[0])
        self.mid_block = _middle(widths[0])
        self.up_blocks = nn.ModuleList()
        last = len(widths) - 2
        for stage, (before, after) in enumerate(itertools.pairwise(widths)):
            blocks = _residual_blocks(before, after, _DECODER_BLOCKS)
            grows = stage < last
            resamplers = [SeedVR2Upsample(after, temporal=stage < last - 1)] if grows else []
            self.up_blocks.append(_stage(blocks, "upsamplers", *resamplers))
        self.conv_norm_out = GroupNorm(widths[-1])
        self.conv_out = causal(widths[-1], out_channels)

    def layers(self) -> list[CausalLayer]:
        """Return the layers from `[B, C_latent, t, h, w]` to `[B, C, T, 8 h, 8 w]`."""
        head = SeedVR2Head(self.conv_norm_out, self.conv_out)
        return in_order(self.conv_in, *_inside(self.mid_block), *_parts(self.up_blocks), head)


def _parts(stages: nn.ModuleList) -> list[nn.Module]:
    """Return the lists of layers of stages in order."""
    return [part for stage in stages for part in cast(nn.ModuleDict, stage).values()]


def _inside(middle: nn.ModuleDict) -> tuple[nn.Module, ...]:
    """Return the layers of the middle in order: residual, attention, residual."""
    resnets, attentions = cast(Any, middle.values())
    return resnets[0], attentions[0], resnets[1]
