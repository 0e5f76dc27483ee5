"""Convolutions in plain PyTorch: the library's product of the joined frames, and int8."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..codes import zero_of
from ..convolution.fused import Fused
from ..convolution.weight import ConvWeight, channels_last
from ..shapes import convolved, new_video

# float32 holds the sum of this many products of a code less its zero, 238 at most, and a weight,
# 127 at most: it is below 2^24.
_EXACT = 512

# Pixels of as many windows are copied at a time.
_COLUMN_NUMBERS = 1 << 22


def fuses(
    x: Tensor, weight: ConvWeight, stride: tuple[int, ...], padding: tuple[int, int], *, norm: bool
) -> Fused:
    """Return what is fused: nothing."""
    return Fused()


def conv3d(
    x: Tensor,
    weight: ConvWeight,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, int],
    tail: Tensor | None = None,
) -> Tensor:
    """Convolve the joined frames of a video, or frames on their own."""
    if x.ndim == 4:
        return channels_last(F.conv2d(x, weight.plain(), None, stride, padding))
    window = x if tail is None else torch.cat([tail, x], dim=2)
    return channels_last(F.conv3d(window, weight.plain(), None, stride, (0, *padding)))


conv2d = conv3d


def int8_conv3d(
    x: Tensor,
    weight: ConvWeight,
    scale: Tensor | None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Sum up to 512 products in float32, which is exact, and these sums in int32."""
    taps = weight.plain()
    shape = convolved(x, taps.shape, (1, 1, 1), (0, 0, 0))
    out = new_video(x.new_empty(0, dtype=dtype), shape) if out is None else out
    for each, frame in itertools.product(range(shape[0]), range(shape[2])):
        sums = _int8_sums(x[each, :, frame : frame + taps.shape[2]], taps, shape)
        if scale is not None:
            sums = sums.float().mul_(scale.flatten().float())
            sums = sums if bias is None else sums.add_(bias.flatten().float())
            if residual is not None:
                sums += residual[each, :, frame].movedim(0, -1)
            sums = sums if residual_bias is None else sums.add_(residual_bias.flatten().float())
        out[each, :, frame] = sums.movedim(-1, 0)
    return out


def _int8_sums(x: Tensor, taps: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the sums of `x` `[C, kt, H, W]` for one frame, int32 `[H', W', C_out]`."""
    *_, height, width = shape
    pixels = x.float() - zero_of(x.dtype)
    windows = pixels.unfold(2, taps.shape[3], 1).unfold(3, taps.shape[4], 1)
    windows, matrix = windows.permute(2, 3, 0, 1, 4, 5), taps.flatten(1).float().T
    sums = torch.zeros(height, width, taps.shape[0], dtype=torch.int32, device=x.device)
    rows = max(1, _COLUMN_NUMBERS // (width * matrix.shape[0]))
    for row in range(0, height, rows):
        columns = windows[row : row + rows].flatten(2)
        for first in range(0, matrix.shape[0], _EXACT):
            products = slice(first, first + _EXACT)
            sums[row : row + rows] += (columns[..., products] @ matrix[products]).to(torch.int32)
    return sums
