"""The results of the ops while their calls are noted: memory on `meta`, and no arithmetic.

PyTorch's own arithmetic on `meta` imports its compiler, which takes seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import shapes
from ..convolution.weight import ConvWeight


def result_of(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Tensor:
    """Return `out`, or memory for the result of a call on `meta`, as on `device`."""
    out = kwargs.get("out")
    if op == "int8_conv3d" and device.type == "cpu":
        _RESULTS[op](*args, **kwargs)  # oneDNN adds no residual to the sums of codes
    return out if out is not None else _RESULTS[op](*args, **kwargs)


def convolution(
    x: Tensor,
    weight: ConvWeight,
    *_: object,
    stride: tuple[int, ...],
    padding: tuple[int, int],
    tail: Tensor | None = None,
    **__: object,
) -> Tensor:
    """Return memory for the result of a convolution."""
    return shapes.new_video(x, shapes.convolved(x, weight.shape, stride, padding, tail))


def _norm(
    x: Tensor,
    *_: object,
    tail: Tensor | None = None,
    border: int = 0,
    codes: Tensor | None = None,
    **__: object,
) -> Tensor:
    return shapes.new_window(x, tail, border, coded=codes is not None)


def _codes(x: Tensor, weight: ConvWeight, *_: object, dtype: torch.dtype, **__: object) -> Tensor:
    shape = shapes.convolved(x, weight.shape, (1, 1, 1), (0, 0, 0))
    return shapes.new_video(x.new_empty(0, dtype=dtype), shape)


def _images(frames: Tensor, *, dtype: torch.dtype, patch: int = 1, **_: object) -> Tensor:
    return frames.new_empty(shapes.images(frames, patch), dtype=dtype)


def _statistics(x: Tensor, groups: int, *_: object) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(shapes.statistics(x, groups), dtype=dtype)


_RESULTS: dict[str, Callable[..., Tensor]] = {
    "attention": lambda q, *_: torch.empty_like(q),
    "average_down": lambda x, channels, *, times, size: shapes.new_video(
        x, shapes.averaged(x, channels, times, size)
    ),
    "bias_residual": lambda x, *_, **__: torch.empty_like(x),
    "frames_to_images": _images,
    "group_norm_silu": _norm,
    "group_norm_statistics": _statistics,
    "int8_conv3d": _codes,
    "interleave_time": lambda x, phases, **_: shapes.new_video(x, shapes.interleaved(x, phases)),
    "merge_phases": lambda grid, *_, **__: shapes.new_video(grid, shapes.merged(grid)),
    "pixel_shuffle_3d": lambda x, size, *_, **__: shapes.new_video(x, shapes.shuffled(x, size)),
    "rms_norm_silu": _norm,
    "conv2d": convolution,
    "conv3d": convolution,
    "silu_mul": lambda x, *_, **__: torch.empty_like(x),
}
