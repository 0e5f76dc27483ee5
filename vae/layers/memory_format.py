"""The memory of activations: channels-last, with the strides that PyTorch knows the format by."""

import torch
from torch import Tensor


def new_video(shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
    """Uninitialised channels-last `[B, C, T, H, W]`, of the dtype and on the device of `like`."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last_3d
    )


def to_unit(frames: Tensor) -> Tensor:
    """uint8 in 0-255 to float32 in [-1, 1]."""
    return frames.float().div_(127.5).sub_(1)


def canonical(x: Tensor) -> Tensor:
    """Give a channels-last tensor the strides of that format in its dimensions of size one too.

    PyTorch leaves those as they were, and with one frame or one column it then takes the tensor for
    another layout.
    """
    _, channels, frames, height, width = x.shape
    strides = (
        channels * frames * height * width,
        1,
        channels * height * width,
        channels * width,
        channels,
    )
    return x.as_strided(x.shape, strides)
