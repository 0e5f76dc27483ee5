"""What callers hand in: checked with one line per error, and brought to the network's layout."""

import torch
from torch import Tensor

# Elements whose finiteness is asked for together.
_CHECKED_AT_ONCE = 1 << 24


def check_tensor(tensor: object, name: str, channels: int) -> None:
    """Check what frames and latents have in common."""
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}; expected a tensor [B, {channels}, T, H, W]"
        )
    if tensor.ndim != 5:
        raise ValueError(
            f"{name} has {tensor.ndim} dimensions, {list(tensor.shape)}; "
            f"expected 5, [B, {channels}, T, H, W]"
        )
    if tensor.shape[1] != channels:
        raise ValueError(f"{name} has {tensor.shape[1]} channels; this VAE needs {channels}")
    if not tensor.numel():
        raise ValueError(
            f"{name} is empty, {list(tensor.shape)}; expected at least one of each dimension"
        )


def check_finite(tensor: Tensor, name: str) -> None:
    """Check that all of `[B, C, T, H, W]` is finite, a few frames at a time."""
    frame = max(1, tensor[:, :, :1].numel())
    # What is made of a long video to check it must not be as long.
    runs = tensor.split(max(1, _CHECKED_AT_ONCE // frame), dim=2)
    if all(bool(torch.isfinite(run).all()) for run in runs):
        return
    bad = sum(run.numel() - int(torch.isfinite(run).sum()) for run in runs)
    raise ValueError(f"{name} has {bad} values that are NaN or infinite; expected finite ones")


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


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
