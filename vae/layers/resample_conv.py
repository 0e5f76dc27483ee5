"""Convolutions that change the size of a frame: folded upsampling, shifted downsampling."""

from torch import Tensor

from ...kernels import merge_phases
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
        call = x, "folded", (1, 1), (1, 1)
        late = not self.route(*call).fused.adds_bias
        grid = self.convolve(*call, cache, Terms(biased=not late))
        shape = (batch, grid.shape[1] // 4, frames, 2 * height, 2 * width)
        out = cache.reused(shape, x)
        bias = self.bias if late else None
        return merge_phases(grid, source, times, bias=bias, out=out)


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
        return self.convolve(x, "shifted", (2, 2), (1, 1), cache, terms)
