"""What every backend may rely on: the arguments of an op fit together.

One line per error, with the value and what was expected, before any work. Layout is no matter of
these checks: a backend that wants another refuses, and the reference takes any.
"""

from math import prod

import torch
from torch import Tensor

from . import shapes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def floats(**tensors: Tensor) -> None:
    """All have a dtype that ops compute in."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name} is {_name(tensor.dtype)}; expected float32, bfloat16, float16 or float64"
            )


def vectors(x: Tensor, channels: int, **tensors: Tensor | None) -> None:
    """All have a number for each channel, in any float dtype (8 bits too), where `x` is."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is {_name(tensor.dtype)}; expected a float dtype")
        if tensor.numel() != channels:
            raise ValueError(f"{name} has {tensor.numel()} numbers; expected {channels}")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}; expected {x.device}")


def video(**tensors: Tensor) -> None:
    """All are `[B, C, T, H, W]`, of a dtype that ops compute in."""
    floats(**tensors)
    for name, tensor in tensors.items():
        _five_dimensions(name, tensor)


def like(x: Tensor, **tensors: Tensor | None) -> None:
    """All have the shape, dtype and device of `x`."""
    for name, tensor in tensors.items():
        if tensor is not None:
            _same(name, tensor, tuple(x.shape), x)


def result(x: Tensor, out: Tensor | None, shape: tuple[int, ...]) -> None:
    """The buffer of the caller fits the result of `x`."""
    if out is not None:
        _same("out", out, shape, x)


def target(out: Tensor | None, shape: tuple[int, ...]) -> None:
    """The buffer of the caller, of any dtype and device, has this shape."""
    if out is not None and tuple(out.shape) != shape:
        raise ValueError(f"out is {list(out.shape)}; expected {list(shape)}")


def window(x: Tensor, tail: Tensor | None, out: Tensor | None) -> None:
    """The tail and the buffer of a causal convolution's input fit `x`."""
    if tail is not None:
        _five_dimensions("tail", tail)
        batch, channels, _, height, width = x.shape
        _same("tail", tail, (batch, channels, tail.shape[2], height, width), x)
    result(x, out, shapes.window(x, tail))


def statistics(x: Tensor, groups: int, given: Tensor | None) -> None:
    """Those of a group norm have a mean and a factor for each frame and group, in wide numbers."""
    if given is not None:
        shape = shapes.statistics(x, groups)
        _same("statistics", given, shape, x, torch.promote_types(x.dtype, torch.float32))


def divides(parts: int, whole: int, name: str) -> None:
    """`parts` divides the channels."""
    if parts < 1 or whole % parts:
        raise ValueError(f"{name}: {parts} does not divide {whole} channels")


def phase_source(grid: Tensor, source: Tensor | None, times: int) -> None:
    """What `merge_phases` adds has the frames and pixels of the grid's windows."""
    if times < 1:
        raise ValueError(f"times is {times}; expected 1 or more")
    if source is None:
        return
    _five_dimensions("source", source)
    batch, channels, frames, height, width = grid.shape
    frames = 1 if frames == 1 else frames // times
    _same("source", source, (batch, source.shape[1], frames, height - 1, width - 1), grid)
    if grid.shape[2] not in (1, frames * times):
        raise ValueError(f"grid has {grid.shape[2]} frames; expected 1 or a multiple of {times}")
    divides(source.shape[1], channels * times, "source")


def shuffle(x: Tensor, size: tuple[int, int, int], order: str) -> None:
    """The blocks of a pixel shuffle fit its channels."""
    if min(size) < 1:
        raise ValueError(f"size is {size}; expected 1 or more of each")
    if sorted(order) != sorted("cthw"):
        raise ValueError(f"order is {order!r}; expected the letters c, t, h, w")
    divides(prod(size), x.shape[1], "size")


def averages(x: Tensor, channels: int, times: int, size: int) -> None:
    """The blocks of `average_down` fit its input."""
    if times < 1 or size < 1:
        raise ValueError(f"times is {times} and size {size}; expected 1 or more of each")
    if x.shape[3] % size or x.shape[4] % size:
        raise ValueError(f"x is {x.shape[3]} x {x.shape[4]} (H x W); expected multiples of {size}")
    divides(channels, x.shape[1] * times * size * size, "channels")


def images(frames: Tensor, dtype: torch.dtype, patch: int, out: Tensor | None) -> None:
    """The images have a dtype that there is, and the buffer their shape."""
    if out is not None:
        dtype = out.dtype
        flat = shapes.images(frames, patch)
        apart = (frames.shape[0], frames.shape[2], *flat[1:])
        if tuple(out.shape) not in (flat, apart):
            raise ValueError(f"out is {list(out.shape)}; expected {list(flat)} or {list(apart)}")
    if dtype not in (*_DTYPES, torch.uint8):
        raise ValueError(f"images are {_name(dtype)}; expected a float dtype or uint8")


def _five_dimensions(name: str, tensor: Tensor) -> None:
    if tensor.ndim != 5:
        raise ValueError(f"{name} is {list(tensor.shape)}; expected [B, C, T, H, W]")


def _same(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    x: Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    dtype = dtype or x.dtype
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}; expected {list(shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {_name(tensor.dtype)}; expected {_name(dtype)}")
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {x.device}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
