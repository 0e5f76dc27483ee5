"""Convolutions in plain PyTorch: the library's product of the joined frames."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..convolution.fused import Fused
from ..convolution.weight import ConvWeight, channels_last


def fuses(
    x: Tensor, weight: ConvWeight, stride: tuple[int, ...], padding: tuple[int, int], *, norm: bool
) -> Fused:
    """Return what is fused for `x` `[B, C, ...]`, `weight`, `stride`, `padding` and `norm`."""
    return Fused()


def conv3d(
    x: Tensor,
    weight: ConvWeight,
    *,
    stride: tuple[int, ...] = (1, 1, 1),
    padding: tuple[int, int] = (0, 0),
    tail: Tensor | None = None,
) -> Tensor:
    """Run `conv3d(x, weight, stride, padding, tail)`; `x` is `[B, C, T, H, W]`."""
    window = x if tail is None else torch.cat([tail, x], dim=2)
    y = F.conv3d(window, weight.plain(), None, stride, (0, *padding))
    return channels_last(y)


def conv2d(
    x: Tensor,
    weight: ConvWeight,
    *,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, int] = (0, 0),
) -> Tensor:
    """Run `conv2d(x, weight, stride, padding)`; `x` is `[N, C, H, W]`."""
    y = F.conv2d(x, weight.plain(), None, stride, padding)
    return channels_last(y)
