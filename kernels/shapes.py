"""Shapes of the results of ops, channels-last memory for them, and the white of images."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .codes import code_dtype

Shape = tuple[int, ...]


def new_video(like: Tensor, shape: Shape) -> Tensor:
    """Return uninitialised channels-last memory in dtype and on the device of `like`."""
    order = channels_last_order(len(shape))
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=order)


def channels_last_order(ndim: int) -> torch.memory_format:
    """Return the channels-last order of frames, `ndim` 4, or of a video, 5."""
    return torch.channels_last if ndim == 4 else torch.channels_last_3d


def new_window(x: Tensor, tail: Tensor | None, border: int = 0, *, coded: bool = False) -> Tensor:
    """Return memory `[B, C, K + T, H, W]` for `window(x, tail, border)`; `coded`: for codes."""
    like = x.new_empty(0, dtype=code_dtype(x.device)) if coded else x
    return new_video(like, window(x, tail, border))


def window(x: Tensor, tail: Tensor | None, border: int = 0) -> Shape:
    """Return `[B, C, K + T, H + 2 * border, W + 2 * border]`, the shape of tail and `x`."""
    batch, channels, frames, height, width = x.shape
    known = 0 if tail is None else tail.shape[2]
    return batch, channels, known + frames, height + 2 * border, width + 2 * border


def as_video(x: Tensor) -> Tensor:
    """View frames `[N, C, H, W]` as those of one video, `[1, C, N, H, W]`."""
    return x.transpose(0, 1).unsqueeze(0) if x.ndim == 4 else x


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
    """Return the shape of a result, below 1 for a small `x`; `padding` of the last dimensions."""
    lengths = list(x.shape[2:])
    lengths[0] += 0 if tail is None else tail.shape[2]
    pads = (*(0,) * (len(lengths) - len(padding)), *padding)
    return convolved_size((x.shape[0], x.shape[1], *lengths), weight_shape, stride, pads)


def convolved_size(
    shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Shape:
    """Return what `convolved` does for the shape of an input."""
    axes = zip(shape[2:], weight_shape[2:], stride, padding, strict=True)
    sizes = ((length + 2 * pad - taps) // step + 1 for length, taps, step, pad in axes)
    return shape[0], weight_shape[0], *sizes
