"""Encoder and decoder of the Wan 2.2 layout: Wan 2.2 (5B), pruned versions, Qwen-Image 2.1.

The graph and the parameter names are those of wan/modules/vae2_2.py (Encoder3d, Decoder3d, and
their Down_ResidualBlock and Up_ResidualBlock): stages with a parameter-free shortcut around each.
Qwen-Image 2.1 is the same graph with one temporal tap, so every frame is a first frame.
"""

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

from torch import Tensor, nn

from ...kernels import average_down, bias_residual
from ..layers.causal_layer import CausalLayer
from ..layers.temporal_cache import TemporalCache
from .base import in_order
from .wan21 import DECODER_BLOCKS, ENCODER_BLOCKS, Wan21Decoder, Wan21Encoder
from .wan_blocks import Downsample, Upsample, residual_blocks


class DownStage(CausalLayer):
    """Residual blocks and a downsampling, plus the averaged input of the stage.

    Height and width are halved with `space`; two frames become one with `time`.
    """

    settles = True

    def __init__(
        self, in_channels: int, out_channels: int, *, space: bool, time: bool, taps: int
    ) -> None:
        super().__init__()
        self.scale = Fraction(1, 2 if space else 1)
        self.pairs = time
        self._patch = 2 if time else 1, 2 if space else 1
        _check_shortcut(in_channels * self._patch[0] * self._patch[1] ** 2, out_channels)
        self.growth = max(1, out_channels // in_channels)
        self.out_channels = out_channels
        blocks = residual_blocks(in_channels, out_channels, ENCODER_BLOCKS, taps)
        self.downsamples = nn.ModuleList(blocks)
        if space:
            self.downsamples.append(Downsample(out_channels, temporal=time, taps=taps))

    @property
    def blocks(self) -> Sequence[CausalLayer]:
        """The layers inside."""
        return in_order(self.downsamples)

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the stage on `x` `[B, C_in, T, H, W]` with `cache`; its sizes may be halved."""
        # Computed first, because the blocks may write into their input.
        times, size = self._patch
        shortcut = average_down(x, self.out_channels, times=times, size=size)
        for block in self.downsamples[:ENCODER_BLOCKS]:
            x = block(x, cache)
        if size == 1:
            return bias_residual(x, residual=shortcut)
        return self.downsamples[ENCODER_BLOCKS](x, cache, residual=shortcut)


class UpStage(CausalLayer):
    """Residual blocks and an upsampling, plus the repeated input of the stage.

    Height and width are doubled with `space`; without it there is no shortcut. One frame becomes
    two with `time`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, space: bool, time: bool, taps: int
    ) -> None:
        super().__init__()
        self.scale = Fraction(2 if space else 1)
        self.times = 2 if time else 1
        phases = (4 if space else 1) * self.times
        if space:
            _check_shortcut(out_channels * phases, in_channels)
        self.growth = max(1, phases * out_channels // in_channels)
        blocks = residual_blocks(in_channels, out_channels, DECODER_BLOCKS, taps)
        self.upsamples = nn.ModuleList(blocks)
        if space:
            self.upsamples.append(Upsample(out_channels, out_channels, temporal=time, taps=taps))

    @property
    def blocks(self) -> Sequence[CausalLayer]:
        """The layers inside."""
        return in_order(self.upsamples)

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the stage on `x` `[B, C_in, T, H, W]` with `cache`; its sizes may be doubled."""
        if len(self.upsamples) == DECODER_BLOCKS:
            for block in self.upsamples:
                x = block(x, cache)
            return x
        # A block with its own shortcut does not write into its input; the others do.
        source = x if self.upsamples[0].shortcut is not None else x.clone()
        for block in self.upsamples[:DECODER_BLOCKS]:
            x = block(x, cache)
        return self.upsamples[DECODER_BLOCKS](x, cache, source)


class Wan22Encoder(Wan21Encoder):
    """Encode frames with pixels in channels to mean and log-variance."""

    def stages(self, widths: Sequence[int], taps: int) -> Iterator[nn.Module]:
        """Yield the stages between the first convolution and the middle."""
        last = len(widths) - 2
        for stage, (before, after) in enumerate(itertools.pairwise(widths)):
            yield DownStage(before, after, space=stage < last, time=0 < stage < last, taps=taps)


class Wan22Decoder(Wan21Decoder):
    """Decode latents to frames with pixels in channels."""

    def stages(self, widths: Sequence[int], taps: int) -> Iterator[nn.Module]:
        """Yield the stages between the middle and the head."""
        last = len(widths) - 2
        for stage, (before, after) in enumerate(itertools.pairwise(widths)):
            yield UpStage(before, after, space=stage < last, time=stage < last - 1, taps=taps)


def _check_shortcut(finer: int, coarser: int) -> None:
    """Check that the channels divide, which a parameter-free shortcut needs."""
    if finer % coarser:
        message = f"a stage has {finer} values for {coarser} channels of its shortcut"
        raise ValueError(f"{message}; expected a multiple")
