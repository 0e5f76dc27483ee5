"""Shapes of the results of ops, channels-last memory for them, and the white of images."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .codes import code_dtype

Shape = tuple[int, ...]


def new_video(like: Tensor, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised channels-last memory on the device and in the dtype of `like`."""
    order = channels_last_order(len(shape))
    dtype = dtype or like.dtype
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=order)


def channels_last_order(ndim: int) -> torch.memory_format:
    """Return the channels-last order of frames, `ndim` 4, or of a video, 5."""
    return torch.channels_last if ndim == 4 else torch.channels_last_3d


def new_window(x: Tensor, tail: Tensor | None, border: int = 0, *, coded: bool = False) -> Tensor:
    """Return memory `[B, C, K + T, H, W]` for `window(x, tail, border)`; `coded`: for codes."""
    return new_video(x, window(x, tail, border), code_dtype(x.device) if coded else None)


def window(x: Tensor, tail: Tensor | None, border: int = 0) -> Shape:
    """Return `[B, C, K + T, H + 2 * border, W + 2 * border]`, the shape of tail and `x`."""
    batch, channels, frames, height, width = x.shape
    known = 0 if tail is None else tail.shape[2]
    return batch, channels, known + frames, height + 2 * border, width + 2 * border


def new_sums(x: Tensor, weight: Any, dtype: torch.dtype) -> Tensor:  # noqa: ANN401, has a `shape`
    """Return memory in `dtype` for the convolution of codes `x` `[B, C, T, H, W]` by `weight`."""
    return new_video(x, convolved(x, weight.shape, (1, 1, 1), (0, 0, 0)), dtype)


def as_frames(x: Tensor) -> Tensor:
    """View `[B, C, T, H, W]` as `[B * T, C, H, W]`, channels-last."""
    if x.shape[2] == 1:
        return x.squeeze(2)
    return x.permute(0, 2, 3, 4, 1).flatten(0, 1).permute(0, 3, 1, 2)


def has_gaps(x: Tensor) -> bool:
    """Return whether the frames of `x` `[B, C, T, H, W]` have no common stride."""
    batch, _, frames, *_ = x.shape
    return min(batch, frames) > 1 and x.stride(0) != frames * x.stride(2)


def as_video(frames: Tensor, batch: int) -> Tensor:
    """View `[B * T, C, H, W]` as `[B, C, T, H, W]`, channels-last."""
    if frames.shape[0] == batch:
        return frames.unsqueeze(2)
    return frames.permute(0, 2, 3, 1).unflatten(0, (batch, -1)).permute(0, 4, 1, 2, 3)


def blocks(count: int, size: int) -> int:
    """Return the number of blocks of `size` for `count` values."""
    return -(-count // size)


def strides(x: Tensor | None) -> tuple[int, int]:
    """Return the strides of batch and time of `x` in elements; 0 for a dimension of one."""
    # That stride is arbitrary, and an odd one would cost a kernel its aligned loads.
    if x is None:
        return 0, 0
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(2) if x.shape[2] > 1 else 0


def statistics(x: Tensor, groups: int) -> Shape:
    """Return the shape `[B, T, 2, groups]` of `group_norm_statistics(x, groups)`."""
    return x.shape[0], x.shape[2], 2, groups


def measured(
    x: Tensor, given: Tensor | None, groups: int, eps: float, measure: Callable[..., Tensor]
) -> Tensor:
    """Return dense statistics of `x`: those `given`, else what `measure` writes into new memory."""
    if given is None:
        out = x.new_empty(statistics(x, groups), dtype=torch.float32)
        return measure(x, out, groups, eps)
    return given.contiguous()


def interleaved(x: Tensor, phases: int) -> Shape:
    """Return the shape `[B, C / phases, phases * T, H, W]` of `interleave_time(x, phases)`."""
    batch, channels, frames, height, width = x.shape
    return batch, channels // phases, phases * frames, height, width


def merged(grid: Tensor) -> Shape:
    """Return the shape `[B, C / 4, T, 2 * H - 2, 2 * W - 2]` of `merge_phases(grid)`."""
    batch, channels, frames, height, width = grid.shape
    return batch, channels // 4, frames, 2 * height - 2, 2 * width - 2


def shuffled(x: Tensor, size: tuple[int, int, int]) -> Shape:
    """Return the shape `[B, C, t * T, h * H, w * W]` of `pixel_shuffle_3d(x, size)`."""
    batch, channels, frames, height, width = x.shape
    times, high, wide = size
    return batch, channels // prod(size), times * frames, high * height, wide * width


def channel_steps(channels: int, size: tuple[int, int, int], order: str) -> dict[str, int]:
    """Return how far apart the values of the indices c, t, h and w of a shuffle's channels are."""
    parts = dict(zip("cthw", (channels, *size), strict=True))
    finer = {letter: order.partition(letter)[2] for letter in parts}
    return {letter: prod(parts[each] for each in finer[letter]) for letter in parts}


def averaged(x: Tensor, channels: int, times: int, size: int) -> Shape:
    """Return the shape `[B, channels, T, H, W]` of `average_down(x, channels, times, size)`."""
    batch, _, frames, height, width = x.shape
    return batch, channels, -(-frames // times), height // size, width // size


def images(frames: Tensor, patch: int) -> Shape:
    """Return the shape `[B * T, H, W, C]` of `frames_to_images(frames, patch)`."""
    batch, channels, length, height, width = shuffled(frames, (1, patch, patch))
    return batch * length, height, width, channels


def images_as_video(images: Tensor, batch: int) -> Tensor:
    """View `[B * T, H, W, C]` or `[B, T, H, W, C]` as `[B, C, T, H, W]`."""
    video = images if images.ndim == 5 else images.unflatten(0, (batch, -1))
    return video.movedim(-1, 1)


def white(dtype: torch.dtype) -> int:
    """Return the value of 1.0 in images of `dtype`."""
    return {torch.uint8: 255, torch.uint16: 65535}.get(dtype, 1)


def convolved(
    x: Tensor,
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    tail: Tensor | None = None,
) -> Shape:
    """Return the shape of a result `[B, C_out, T', H', W']`, below 1 for a small `x`."""
    # `weight_shape` has two or three dimensions of taps, `padding` is of the last dimensions.
    taps = *weight_shape[:2], *(1,) * (5 - len(weight_shape)), *weight_shape[2:]
    return convolved_size(window(x, tail), taps, stride, (*(0,) * (3 - len(padding)), *padding))


def convolved_size(
    shape: Sequence[int], weight_shape: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Shape:
    """Return the shape of a result for an input, weight, stride and padding of as many axes."""
    axes = zip(shape[2:], weight_shape[2:], stride, padding, strict=True)
    sizes = [(length + 2 * pad - taps) // step + 1 for length, taps, step, pad in axes]
    return shape[0], weight_shape[0], *sizes
