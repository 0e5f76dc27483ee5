"""Checks of the arguments of ops, before any backend runs.

Every error is one line with the value and what was expected. Memory layout is not checked here: a
backend that needs another layout refuses the call, and the reference accepts any.
"""

from math import prod

import torch
from torch import Tensor

from . import codes, shapes
from .convolution.weight import ConvWeight

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def floats(**tensors: Tensor) -> None:
    """Check that all `tensors` have a dtype that ops compute in."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name} is {_name(tensor.dtype)}; expected float32, bfloat16, float16 or float64"
            )


def vectors(x: Tensor, channels: int, **tensors: Tensor | None) -> None:
    """Check that all tensors have `channels` values, any float dtype and the device of `x`."""
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
    """Check that all `tensors` are `[B, C, T, H, W]`, in a dtype that ops compute in."""
    floats(**tensors)
    for name, tensor in tensors.items():
        _dimensions(name, tensor)


def frames(**tensors: Tensor) -> None:
    """Check that all `tensors` are `[N, C, H, W]`, in a dtype that ops compute in."""
    floats(**tensors)
    for name, tensor in tensors.items():
        _dimensions(name, tensor, "[N, C, H, W]")


def convolution(
    x: Tensor,
    weight: ConvWeight,
    stride: tuple[int, ...],
    padding: tuple[int, int],
    tail: Tensor | None = None,
) -> shapes.Shape:
    """Check weight and options of a convolution against `x`, and return the result's shape."""
    if weight.ndim != x.ndim or weight.shape[1] != x.shape[1]:
        taps = "kt, kh, kw" if x.ndim == 5 else "kh, kw"
        raise ValueError(f"weight is {list(weight.shape)}; expected [C_out, {x.shape[1]}, {taps}]")
    if min(weight.shape) < 1:
        raise ValueError(f"weight is {list(weight.shape)}; expected at least 1 in each dimension")
    if weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(
            f"weight is {_name(weight.dtype)} on {weight.device}; "
            f"expected {_name(x.dtype)} on {x.device}"
        )
    if len(stride) != x.ndim - 2 or min(stride) < 1:
        raise ValueError(f"stride is {stride}; expected {x.ndim - 2} numbers from 1 on")
    if len(padding) != 2 or min(padding) < 0:
        raise ValueError(f"padding is {padding}; expected 2 numbers from 0 on")
    _tail(x, tail, x.dtype)
    result = shapes.convolved(x, weight.shape, stride, padding, tail)
    if min(*result[2:], *x.shape[-2:]) < 1:
        raise ValueError(
            f"x is {list(x.shape)}, smaller than the kernel {list(weight.shape[2:])} "
            "with its padding; expected at least its size"
        )
    return result


def results(x: Tensor, shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    """Check that all tensors have `shape`, and dtype and device of `x`; None is skipped."""
    for name, tensor in tensors.items():
        if tensor is not None:
            _same(name, tensor, shape, x)


def attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that keys and values are as the queries `q` `[B, N, d]`."""
    _same("k", k, tuple(q.shape), q)
    _same("v", v, tuple(q.shape), q)


def target(out: Tensor | None, shape: tuple[int, ...]) -> None:
    """Check that the buffer `out` of any dtype and device, if given, has `shape`."""
    if out is not None and tuple(out.shape) != shape:
        raise ValueError(f"out is {list(out.shape)}; expected {list(shape)}")


def window(
    x: Tensor,
    tail: Tensor | None,
    out: Tensor | None,
    border: int,
    factors: Tensor | None,
    saturated: Tensor | None,
) -> None:
    """Check tail, buffer, border, codes `[C]` and their counters `[2]` of a norm of `x`."""
    if (factors is None) != (saturated is None):
        raise ValueError("only one of codes and saturated is given; expected both or none")
    dtype = x.dtype
    if factors is not None and saturated is not None:
        _same("codes", factors, (x.shape[1],), x, torch.float32)
        _same("saturated", saturated, (2,), x, torch.int64)
        dtype = codes.code_dtype(x.device) if out is None else out.dtype
        if dtype not in codes.DTYPES:
            raise ValueError(f"out is {_name(dtype)}; expected int8 or uint8 for codes")
    if border < 0:
        raise ValueError(f"border is {border}; expected 0 or more")
    _tail(x, tail, dtype)
    if out is not None:
        _same("out", out, shapes.window(x, tail, border), x, dtype)


def code_convolution(
    x: Tensor,
    weight: ConvWeight,
    scale: Tensor | None,
    dtype: torch.dtype,
    **terms: Tensor | None,
) -> None:
    """Check the arguments of `int8_conv3d`."""
    if x.dtype not in codes.DTYPES:
        raise ValueError(f"x is {_name(x.dtype)}; expected int8 or uint8")
    _dimensions("x", x)
    if weight.dtype != torch.int8 or weight.ndim != 5 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"weight is {list(weight.shape)} in {_name(weight.dtype)}; "
            f"expected [C_out, {x.shape[1]}, kt, kh, kw] in int8"
        )
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}; expected {x.device}")
    shape = shapes.convolved(x, weight.shape, (1, 1, 1), (0, 0, 0))
    if min(shape[1:]) < 1:
        raise ValueError(f"x is {list(x.shape)}; expected at least {list(weight.shape[2:])}")
    names = ("bias", "residual_bias")
    vectors(x, weight.shape[0], scale=scale, **{name: terms[name] for name in names})
    added = [name for name in (*names, "residual") if terms[name] is not None]
    if scale is None and (dtype != torch.int32 or added):
        raise ValueError(f"scale is None with {_name(dtype)} and {added}; expected int32 sums")
    if scale is not None and dtype not in _DTYPES:
        raise ValueError(f"the result is {_name(dtype)}; expected a float dtype with a scale")
    for name in ("residual", "out"):
        if (tensor := terms[name]) is not None:
            _same(name, tensor, shape, x, dtype)


def statistics(x: Tensor, groups: int, given: Tensor | None) -> None:
    """Check `given` `[B, T, 2, groups]`, if any, against `x` `[B, C, T, H, W]` and `groups`."""
    if given is not None:
        shape = shapes.statistics(x, groups)
        _same("statistics", given, shape, x, torch.promote_types(x.dtype, torch.float32))


def divides(parts: int, whole: int, name: str) -> None:
    """Check that `parts`, the argument `name`, divides `whole` channels."""
    if parts < 1 or whole % parts:
        raise ValueError(f"{name}: {parts} does not divide {whole} channels")


def phase_source(grid: Tensor, source: Tensor | None, times: int) -> None:
    """Check the `source` of `merge_phases` against the windows of its grid."""
    if times < 1:
        raise ValueError(f"times is {times}; expected 1 or more")
    if source is None:
        return
    _dimensions("source", source)
    batch, channels, frames, height, width = grid.shape
    frames = 1 if frames == 1 else frames // times
    _same("source", source, (batch, source.shape[1], frames, height - 1, width - 1), grid)
    if grid.shape[2] not in (1, frames * times):
        raise ValueError(f"grid has {grid.shape[2]} frames; expected 1 or a multiple of {times}")
    divides(source.shape[1], channels * times, "source")


def shuffle(x: Tensor, size: tuple[int, int, int], order: str) -> None:
    """Check the block size of a pixel shuffle, and the order of its indices."""
    if min(size) < 1:
        raise ValueError(f"size is {size}; expected 1 or more of each")
    if sorted(order) != sorted("cthw"):
        raise ValueError(f"order is {order!r}; expected the letters c, t, h, w")
    divides(prod(size), x.shape[1], "size")


def averages(x: Tensor, channels: int, times: int, size: int) -> None:
    """Check the block size of `average_down`."""
    if times < 1 or size < 1:
        raise ValueError(f"times is {times} and size {size}; expected 1 or more of each")
    if x.shape[3] % size or x.shape[4] % size:
        raise ValueError(f"x is {x.shape[3]} x {x.shape[4]} (H x W); expected multiples of {size}")
    divides(channels, x.shape[1] * times * size * size, "channels")


def images(frames: Tensor, dtype: torch.dtype, patch: int, out: Tensor | None) -> None:
    """Check dtype and buffer of `frames_to_images`; `dtype` is that of new images."""
    if out is not None:
        dtype = out.dtype
        flat = shapes.images(frames, patch)
        apart = (frames.shape[0], frames.shape[2], *flat[1:])
        if tuple(out.shape) not in (flat, apart):
            raise ValueError(f"out is {list(out.shape)}; expected {list(flat)} or {list(apart)}")
    if dtype not in (*_DTYPES, torch.uint8, torch.uint16):
        raise ValueError(f"images are {_name(dtype)}; expected a float dtype, uint8 or uint16")


def _tail(x: Tensor, tail: Tensor | None, dtype: torch.dtype) -> None:
    if tail is not None:
        _dimensions("tail", tail)
        batch, channels, _, height, width = x.shape
        _same("tail", tail, (batch, channels, tail.shape[2], height, width), x, dtype)


def _dimensions(name: str, tensor: Tensor, expected: str = "[B, C, T, H, W]") -> None:
    if tensor.ndim != expected.count(",") + 1:
        raise ValueError(f"{name} is {list(tensor.shape)}; expected {expected}")


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
