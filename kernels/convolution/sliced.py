"""A convolution over time as one of single frames, for devices with a poor `conv3d`.

The frames that the temporal taps of a result see are joined as channels, a few results at a time:
`conv2d([frame t, frame t + 1, ...], [slice 0, slice 1, ...])`. So all products of a value are one
sum, which is rounded once. A sum of separate convolutions of the slices would round each of them.
"""

from collections.abc import Mapping
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
    # `[C_out, C, kt, kh, kw]` as `[C_out, kt * C, kh, kw]`.
    taps = weight.laid_out("sliced", lambda plain: channels_last(plain.movedim(2, 1).flatten(1, 2)))
    result = shapes.new_video(x, shapes.convolved(x, weight.shape, stride, padding, tail))
    frames = [*(() if tail is None else tail.unbind(2)), *x.unbind(2)]
    batch, channels, _, height, width = x.shape
    times, slices = result.shape[2], weight.shape[2]
    one = batch * slices * channels * height * width * x.element_size()
    # Equal groups, because some libraries search for an algorithm for each shape.
    most = min(times, max(1, _JOINED_BYTES // max(1, one)))
    count = max(size for size in range(1, most + 1) if times % size == 0)
    for start in range(0, times, count):
        joined = x.new_empty(batch, count, height, width, slices, channels)
        for place in range(count):
            for at in range(slices):
                seen = frames[(start + place) * stride[0] + at]
                joined[:, place, :, :, at] = seen.movedim(1, -1)
        rows = joined.flatten(0, 1).flatten(-2).permute(0, 3, 1, 2)
        if contiguous:
            rows, taps = rows.contiguous(), taps.contiguous()
        y = cudnn.convolve(rows, taps, None, stride[1:], padding)
        result[:, :, start : start + count] = y.unflatten(0, (batch, count)).transpose(1, 2)
    return result
