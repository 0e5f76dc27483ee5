"""Convolutions in plain PyTorch: the library's product of the joined frames, and int8."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..codes import zero_of
from ..convolution.fused import Fused
from ..convolution.weight import ConvWeight, channels_last
from ..devices import unsearched
from ..shapes import as_frames, as_video, new_sums

# float32 holds the sum of this many products of a code less its zero, 238 at most, and a weight,
# 127 at most: it is below 2^24.
_EXACT = 512

# Values of windows that are copied at a time: 16 MiB.
_WINDOW_VALUES = 1 << 22


def fuses(_: ConvWeight) -> Fused:
    """Return what is fused: nothing."""
    return Fused()


def conv3d(x: Tensor, weight: ConvWeight, *terms: Any) -> Tensor:  # noqa: ANN401
    """Convolve the joined frames of a video, or each frame, without terms, in new memory."""
    *_, tail, _, stride, padding, variant = terms
    taps = weight.plain()
    window = as_frames(x) if weight.ndim == 4 else x
    if tail is not None and weight.ndim == 5:
        window = torch.cat([tail, x], dim=2)
    if variant == 1:
        window, taps = window.contiguous(), taps.contiguous()
    with unsearched(x.device):
        if weight.ndim == 4:
            y = channels_last(F.conv2d(window, taps, None, stride[1:], padding))
            return as_video(y, x.shape[0])
        return channels_last(F.conv3d(window, taps, None, stride, (0, *padding)))


def int8_conv3d(x: Tensor, weight: ConvWeight, scale: Tensor | None, *terms: Any) -> Tensor:  # noqa: ANN401
    """Sum up to 512 products in float32, which is exact, and these sums in int32."""
    bias, residual, residual_bias, out, dtype = terms
    taps = weight.plain()
    matrix = taps.flatten(1).float().T
    out = new_sums(x, taps, dtype) if out is None else out
    for each, frame in itertools.product(range(out.shape[0]), range(out.shape[2])):
        seen = x[each, :, frame : frame + taps.shape[2]]
        sums = _int8_sums(seen, matrix, taps.shape[3], taps.shape[4])
        if scale is not None:
            sums = sums.float().mul_(scale.flatten())
            sums = sums if bias is None else sums.add_(bias.flatten())
            if residual is not None:
                sums += residual[each, :, frame].movedim(0, -1)
            sums = sums if residual_bias is None else sums.add_(residual_bias.flatten())
        out[each, :, frame] = sums.movedim(-1, 0)
    return out


def _int8_sums(x: Tensor, matrix: Tensor, high: int, wide: int) -> Tensor:
    """Return `windows @ matrix` of a frame, int32 `[H', W', C_out]`, exact.

    The windows of `high` x `wide` pixels of `x` `[C, kt, H, W]` are rows of `C * kt * high * wide`.
    """
    pixels = x.float() - zero_of(x.dtype)
    windows = pixels.unfold(2, high, 1).unfold(3, wide, 1).permute(2, 3, 0, 1, 4, 5)
    sums = x.new_zeros(*windows.shape[:2], matrix.shape[1], dtype=torch.int32)
    rows = max(1, _WINDOW_VALUES // max(1, windows.shape[1:].numel()))
    for row in range(0, sums.shape[0], rows):
        columns = windows[row : row + rows].flatten(2)
        for first in range(0, matrix.shape[0], _EXACT):
            products = slice(first, first + _EXACT)
            sums[row : row + rows] += (columns[..., products] @ matrix[products]).to(torch.int32)
    return sums
