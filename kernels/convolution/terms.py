"""The result of a convolution, and the sum of its biases."""

import torch
from torch import Tensor

from ..shapes import convolved, new_video
from .weight import ConvWeight


def result_of(
    x: Tensor,
    weight: ConvWeight,
    tail: Tensor | None,
    out: Tensor | None,
    stride: tuple[int, int, int],
    padding: tuple[int, int],
) -> Tensor:
    """Return `out`, or new memory for the result `[B, C_out, T', H', W']`."""
    if out is not None:
        return out
    return new_video(x, convolved(x, weight.shape, stride, padding, tail))


def sum_of(bias: Tensor | None, other: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of two biases `[C]` in float32 or wider; one that is given alone, as it is."""
    if bias is None or other is None:
        return other if bias is None else bias
    wide = torch.promote_types(dtype, torch.float32)
    return bias.flatten().to(wide) + other.flatten().to(wide)
