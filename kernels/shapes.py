"""The shapes of the results of ops, and channels-last memory for them."""

from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]


def new_video(like: Tensor, shape: Shape) -> Tensor:
    """Uninitialised channels-last memory for `[B, C, T, H, W]`."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last_3d
    )


def new_window(x: Tensor, tail: Tensor | None) -> Tensor:
    """Memory for the frames of `tail` and those of `x` behind them."""
    return new_video(x, window(x, tail))


def window(x: Tensor, tail: Tensor | None) -> Shape:
    """Of the frames of `tail` and `x`."""
    batch, channels, frames, height, width = x.shape
    return batch, channels, (0 if tail is None else tail.shape[2]) + frames, height, width


def statistics(x: Tensor, groups: int) -> Shape:
    """Of `group_norm_statistics`."""
    return x.shape[0], x.shape[2], 2, groups


def interleaved(x: Tensor, phases: int) -> Shape:
    """Of `interleave_time`."""
    batch, channels, frames, height, width = x.shape
    return batch, channels // phases, phases * frames, height, width


def merged(grid: Tensor) -> Shape:
    """Of `merge_phases`."""
    batch, channels, frames, height, width = grid.shape
    return batch, channels // 4, frames, 2 * height - 2, 2 * width - 2


def shuffled(x: Tensor, size: tuple[int, int, int]) -> Shape:
    """Of `pixel_shuffle_3d`."""
    batch, channels, frames, height, width = x.shape
    times, high, wide = size
    return batch, channels // prod(size), times * frames, high * height, wide * width


def averaged(x: Tensor, channels: int, times: int, size: int) -> Shape:
    """Of `average_down`."""
    batch, _, frames, height, width = x.shape
    return batch, channels, -(-frames // times), height // size, width // size


def images(frames: Tensor, patch: int) -> Shape:
    """Of `frames_to_images`: `[B * T, H, W, C]`."""
    batch, channels, length, height, width = shuffled(frames, (1, patch, patch))
    return batch * length, height, width, channels
