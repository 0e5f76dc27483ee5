"""A convolution over time as one of single frames, for devices with a poor `conv3d`.

The frames that the temporal taps of a result see are joined as channels, a few results at a time:
`conv2d([frame t, frame t + 1, ...], [slice 0, slice 1, ...])`. So all products of a value are one
sum, which is rounded once. A sum of separate convolutions of the slices would round each of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from .. import shapes
from ..backends import Launch
from ..errors import Refusal
from . import cudnn
from .fused import Fused
from .weight import ConvWeight, channels_last

# Memory of joined frames, if one result needs less.
_JOINED_BYTES = 64 << 20


def refuse(_: Tensor) -> None:
    """Refuse nothing."""


def launches() -> Mapping[str, Launch]:
    """Return the launches by op."""
    return {"conv3d": _conv3d}


def fuses(_: ConvWeight) -> Fused:
    """Return what is fused."""
    return Fused(tail=True)


def _conv3d(x: Tensor, weight: ConvWeight, *terms: Any) -> Tensor:  # noqa: ANN401
    *_, tail, _, stride, padding, variant = terms
    if weight.ndim == 4:
        raise Refusal("it is for taps in time")
    return convolve(x, weight, tail, stride, padding, contiguous=variant == 1)


def convolve(
    x: Tensor,
    weight: ConvWeight,
    tail: Tensor | None,
    stride: tuple[int, int, int],
    padding: tuple[int, int],
    *,
    contiguous: bool = False,
) -> Tensor:
    """Convolve a video `[B, C, T, H, W]` after its `tail` without terms, in new memory."""
    taps = weight.laid_out("sliced", _joined_slices)
    shape = shapes.convolved(x, weight.shape, stride, padding, tail)
    result = shapes.new_video(x, shape)
    batch, channels, _, height, width = x.shape
    slices = weight.shape[2]
    one = batch * slices * channels * height * width * x.element_size()
    # Equal groups, because some libraries search for an algorithm for each shape.
    most = min(shape[2], max(1, _JOINED_BYTES // max(1, one)))
    count = max(size for size in range(1, most + 1) if shape[2] % size == 0)
    for start in range(0, shape[2], count):
        part = result[:, :, start : start + count]
        made = part.shape[2]
        joined = x.new_empty(batch, made, height, width, slices, channels)
        for at in range(slices):
            for place, frames in _read(tail, x, start * stride[0] + at, made, stride[0]):
                joined[:, place : place + frames.shape[2], :, :, at] = frames.movedim(1, -1)
        rows = joined.flatten(0, 1).flatten(-2).permute(0, 3, 1, 2)
        if contiguous:
            rows, taps = rows.contiguous(), taps.contiguous()
        y = cudnn.convolve(rows, taps, None, stride[1:], padding)
        part.copy_(y.unflatten(0, (batch, made)).transpose(1, 2))
    return result


def _joined_slices(plain: Tensor) -> Tensor:
    """Return `[C_out, C, kt, kh, kw]` as `[C_out, kt * C, kh, kw]`, channels-last."""
    return channels_last(plain.movedim(2, 1).flatten(1, 2))


def _read(
    tail: Tensor | None, x: Tensor, first: int, count: int, step: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield `count` frames of the tail and `x`, from `first` on, with their place among them."""
    known = 0 if tail is None else tail.shape[2]
    early = min(count, max(0, -(-(known - first) // step)))
    if tail is not None and early:
        yield 0, tail[:, :, first : first + (early - 1) * step + 1 : step]
    if early < count:
        start = first + early * step - known
        yield early, x[:, :, start : start + (count - early - 1) * step + 1 : step]
