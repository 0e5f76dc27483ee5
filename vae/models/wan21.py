"""Encoder and decoder of the Wan 2.1 layout: Wan 2.1, Qwen-Image, pruned and 2x versions.

The graph and the parameter names are those of wan/modules/vae.py (Encoder3d, Decoder3d).
"""

import itertools
from collections.abc import Iterator, Sequence

from torch import nn

from ..layers.causal_conv import CausalConv3d
from .base import Network
from .wan_blocks import Downsample, Head, Upsample, middle, residual_blocks

ENCODER_BLOCKS, DECODER_BLOCKS = 2, 3

# Whether the resampling after each stage also changes the number of frames, in the encoder's order.
_TEMPORAL = (False, True, True)


class Wan21Encoder(Network):
    """Encode frames to `[B, 2 * C_latent, t, H / 8, W / 8]`, before the 1x1x1 convolution."""

    def __init__(self, widths: Sequence[int], channels: int, latents: int, taps: int = 3) -> None:
        super().__init__()
        self.conv1 = CausalConv3d(channels, widths[0], (taps, 3, 3))
        self.downsamples = nn.ModuleList(self.stages(widths, taps))
        self.middle = middle(widths[-1], taps)
        self.head = Head(widths[-1], 2 * latents, taps)

    def stages(self, widths: Sequence[int], taps: int) -> Iterator[nn.Module]:
        """Yield the layers between the first convolution and the middle."""
        for stage, (before, after) in enumerate(itertools.pairwise(widths)):
            yield from residual_blocks(before, after, ENCODER_BLOCKS, taps)
            if stage < len(_TEMPORAL):
                yield Downsample(after, temporal=_TEMPORAL[stage], taps=taps)


class Wan21Decoder(Network):
    """Decode latents, after the 1x1x1 convolution, to frames `[B, C_out, T, 8 h, 8 w]`."""

    def __init__(self, widths: Sequence[int], channels: int, latents: int, taps: int = 3) -> None:
        super().__init__()
        self.conv1 = CausalConv3d(latents, widths[0], (taps, 3, 3))
        self.middle = middle(widths[0], taps)
        self.upsamples = nn.ModuleList(self.stages(widths, taps))
        self.head = Head(widths[-1], channels, taps)

    def stages(self, widths: Sequence[int], taps: int) -> Iterator[nn.Module]:
        """Yield the layers between the middle and the head; upsampling halves the channels."""
        before = widths[0]
        for stage, after in enumerate(widths[1:]):
            yield from residual_blocks(before, after, DECODER_BLOCKS, taps)
            if stage < len(_TEMPORAL):
                before = after // 2
                temporal = _TEMPORAL[::-1][stage]
                yield Upsample(after, before, temporal=temporal, taps=taps)
