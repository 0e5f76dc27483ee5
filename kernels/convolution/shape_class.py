"""Shape classes: the convolutions that share a trial and its choice.

A class is the op with the channels, taps, stride and dtype, the size of the result as a power of
four, whether it has one frame or several, and whether a norm follows that a candidate can fuse.
A size of a video and the next larger one are mostly of the same classes: 480 x 832 and 720 x 1280
are at each level of a VAE.

A class has no padding, because frames with a border and frames without are calls of one layer. It
has no tail, bias or residual either: they cost all candidates the same or are part of the layer,
and would multiply the trials. But the fastest candidate must be right with them too.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..triton_ops.convolution_tiles import WIDEST
from .weight import ConvWeight

# Multiply-adds of a frame from which on a trial pays. 1e10 take 50 us at 400 TFLOP/s, about the
# most of an H200; launches and memory decide the time of less. It leaves out the layers of a VAE
# with 16 or 3 channels and those between its smallest levels: about 1 % of a decode of Wan 2.1. The
# class is compared, not the call: a choice holds for all calls of a class.
LEAST_PRODUCTS = 1e10


class ShapeClass(NamedTuple):
    """What decides which candidate is the fastest.

    Attributes:
        op: `conv2d` or `conv3d`.
        device: Device of the call.
        dtype: Dtype of the activation.
        taps: `[C_out, C, ...]`, the shape of the weight.
        stride: Stride of each dimension of the kernel.
        area: Largest power of 4, as its exponent, that is at most height times width of the result.
        several: The result has more than one frame.
        norm: A norm follows, and a tile can hold all channels of a pixel for it.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    area: int
    several: bool
    norm: bool

    def name(self) -> str:
        """Return the name of the class in the store, without the device."""
        numbers = ("x".join(map(str, each)) for each in (self.taps, self.stride))
        words = [self.op, str(self.dtype).removeprefix("torch."), *numbers, f"4^{self.area}"]
        words += ["frames" if self.several else "frame", *(["norm"] if self.norm else [])]
        return " ".join(words)

    def products(self) -> int:
        """Return the multiply-adds of a frame in the middle of the class."""
        return 2 * 4**self.area * math.prod(self.taps)


def class_of(op: str, x: Tensor, weight: ConvWeight, kwargs: Mapping[str, Any]) -> ShapeClass:
    """Return the shape class of a call.

    Args:
        op: `conv2d` or `conv3d`.
        x: `[B, C, T, H, W]` or `[N, C, H, W]`.
        weight: `[C_out, C, ...]`.
        kwargs: The other arguments of the op. Without `out` it is a question for the candidate of
            later calls, with the new frames alone.

    Returns:
        The class.
    """
    stride, padding, taps = kwargs["stride"], kwargs["padding"], weight.shape
    sides = zip(x.shape[-2:], padding, taps[-2:], stride[-2:], strict=True)
    height, width = ((side + 2 * pad - count) // step + 1 for side, pad, count, step in sides)
    frames = x.shape[0]
    if op == "conv3d":
        tail, count, time_taps = kwargs.get("tail"), x.shape[2], taps[2]
        if tail is not None or "out" in kwargs:
            count += 0 if tail is None else tail.shape[2]
            frames *= (count - time_taps) // stride[0] + 1
        else:
            frames *= max(1, count // stride[0])
    area = (max(1, height * width).bit_length() - 1) // 2
    norm = kwargs.get("gamma") is not None and taps[0] <= WIDEST
    return ShapeClass(op, x.device, x.dtype, taps, tuple(stride), area, frames > 1, norm)
