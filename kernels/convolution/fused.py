"""What a candidate of the convolutions does in its own pass, and what all of them share."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..shapes import convolved, new_video
from .weight import ConvWeight

# Most channels of a tile of our kernels; more would spill registers.
WIDEST = 192


class Fused(NamedTuple):
    """What the convolution that runs some calls does without another pass."""

    # It reads the tail where it is. Otherwise it copies tail and new frames into one block, so the
    # caller should write them there in the first place, and pass no tail.
    tail: bool = False
    sums: bool = False  # It adds bias and residual, and writes into `out`.
    # It writes norm and SiLU of the result for a `gamma`; then it has `sums` too.
    norm: bool = False
    bias: bool = False  # It adds a bias, even without `sums`.

    @property
    def adds_bias(self) -> bool:
        """Whether a bias costs nothing."""
        return self.bias or self.sums


def of_ours(outputs: int) -> Fused:
    """Return what our kernels fuse: everything, the norm where a tile has all channels."""
    return Fused(tail=True, sums=True, bias=True, norm=outputs <= WIDEST)


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
