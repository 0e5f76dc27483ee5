"""Convolutions that change the size of a frame: folded upsampling, shifted downsampling."""

from torch import Tensor

from ...kernels import WeightForm, merge_phases
from .conv import BIAS, Conv, Terms
from .temporal_cache import TemporalCache


class UpsampleConv2d(Conv):
    """Nearest 2x in space and a 3x3 convolution of every frame, folded into one convolution.

    The rows `2 i` and `2 i + 1` of the large picture only see the rows `i - 1`, `i` and `i + 1` of
    the small one. So each of its four phases is a 2x2 convolution of the small picture, with the
    sum of the taps that fall on one pixel: 16 products instead of 36, and no large intermediate
    picture. Zero padding of the large picture equals zero padding of the small one.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, (3, 3))

    def forward(
        self, x: Tensor, cache: TemporalCache, source: Tensor | None = None, times: int = 1
    ) -> Tensor:
        """Upsample, convolve, and add `source` `[B, C, T / times, H, W]` as in `merge_phases`."""
        batch, _, frames, height, width = x.shape
        route = self.routed(WeightForm("folded", x.dtype), (1, 1, 1), cache)
        biased = route.fused.adds_bias
        grid = self.convolve(x, route, (1, 1), cache, Terms(biased=biased))
        out = cache.reused((batch, grid.shape[1] // 4, frames, 2 * height, 2 * width), x)
        return merge_phases(grid, source, times, bias=None if biased else self.bias, out=out)


class StridedConv2d(Conv):
    """A 3x3 convolution of every frame with stride 2, zero-padded at the right and bottom only.

    PyTorch pads both sides equally. With a fourth row and column of zero taps in front, a padding
    of one on each side reads the same pixels as Wan's `ZeroPad2d((0, 1, 0, 1))` with padding 0,
    without a padded copy. The extra products are 1-2 % of an encode.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, (3, 3))

    def forward(self, x: Tensor, cache: TemporalCache, terms: Terms = BIAS) -> Tensor:
        """Convolve to `[B, C_out, T, H / 2, W / 2]`."""
        route = self.routed(WeightForm("shifted", x.dtype), (1, 2, 2), cache)
        return self.convolve(x, route, (1, 1), cache, terms)
