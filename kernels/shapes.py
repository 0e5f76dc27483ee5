"""Shapes of the results of ops, and channels-last memory for them."""

from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]


def new_video(like: Tensor, shape: Shape) -> Tensor:
    """Return uninitialised channels-last memory `[B, C, T, H, W]` of `shape`, dtype as `like`."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last_3d
    )


def new_window(x: Tensor, tail: Tensor | None) -> Tensor:
    """Return memory `[B, C, K + T, H, W]` for the frames of `tail` followed by those of `x`."""
    return new_video(x, window(x, tail))


def window(x: Tensor, tail: Tensor | None) -> Shape:
    """Return the shape `[B, C, K + T, H, W]` of the frames of `tail` followed by those of `x`."""
    batch, channels, frames, height, width = x.shape
    return batch, channels, (0 if tail is None else tail.shape[2]) + frames, height, width


def statistics(x: Tensor, groups: int) -> Shape:
    """Return the shape `[B, T, 2, groups]` of `group_norm_statistics(x, groups)`."""
    return x.shape[0], x.shape[2], 2, groups


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


def averaged(x: Tensor, channels: int, times: int, size: int) -> Shape:
    """Return the shape `[B, channels, T, H, W]` of `average_down(x, channels, times, size)`."""
    batch, _, frames, height, width = x.shape
    return batch, channels, -(-frames // times), height // size, width // size


def images(frames: Tensor, patch: int) -> Shape:
    """Return the shape `[B * T, H, W, C]` of `frames_to_images(frames, patch)`."""
    batch, channels, length, height, width = shuffled(frames, (1, patch, patch))
    return batch * length, height, width, channels
