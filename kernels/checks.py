"""Checks of the arguments of ops, before any backend runs.

Every error is one line with the value and what was expected. Memory layout is not checked here: a
backend that needs another layout refuses the call, and the reference accepts any.

Environment:
    FAST_VIDEO_VAE_CHECKS: 1 checks the calls within a stream too, as in the tests.
"""

import os
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from . import shapes
from .codes import DTYPES as CODES
from .codes import code_dtype
from .convolution.weight import ConvWeight
from .ready.seen import snapshot

# Dtypes that ops compute in, and those of images.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
IMAGES = (*FLOATS, torch.uint8, torch.uint16)

# Checks are made in every call, not only outside of the streams, whose layers have made them.
_ALWAYS = os.environ.get("FAST_VIDEO_VAE_CHECKS") == "1"


def wanted() -> bool:
    """Return whether the arguments of a call are checked: not within a video of a stream."""
    return _ALWAYS or snapshot() is None


def fit(
    x: Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype] = (),
    /,
    **tensors: Tensor | ConvWeight | None,
) -> None:
    """Check shape (a letter is any size), dtype (without `dtypes` that of `x`), device of `x`."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        sizes = list(tensor.shape)
        pairs = zip(shape, sizes, strict=False)
        wrong = [want for want, size in pairs if want != size and not isinstance(want, str)]
        if wrong or len(sizes) != len(shape):
            raise ValueError(f"{name} is {sizes}; expected [{', '.join(map(str, shape))}]")
        one_of(name, tensor.dtype, dtypes or (x.dtype,))
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}; expected {x.device}")


def one_of(name: str, dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> None:
    """Check a dtype."""
    if dtype not in dtypes:
        given, *expected = (str(each).removeprefix("torch.") for each in (dtype, *dtypes))
        raise ValueError(f"{name} is {given}; expected {', '.join(expected)}")


def video(**tensors: Tensor) -> None:
    """Check videos `[B, C, T, H, W]` in a dtype that ops compute in."""
    for name, tensor in tensors.items():
        fit(tensor, "BCTHW", FLOATS, **{name: tensor})


def vectors(x: Tensor, count: int, **tensors: Tensor | None) -> None:
    """Check vectors of `count` values, in any shape and float dtype, on the device of `x`."""
    for name, tensor in tensors.items():
        if tensor is not None:
            dtypes = (tensor.dtype,) if tensor.is_floating_point() else FLOATS
            fit(x, (count,), dtypes, **{name: tensor.flatten()})


def least(name: str, value: int, smallest: int) -> None:
    """Check a number."""
    if value < smallest:
        raise ValueError(f"{name} is {value}; expected {smallest} or more")


def each(name: str, values: Sequence[int], count: int, smallest: int) -> None:
    """Check `count` numbers."""
    if len(values) != count or min(values) < smallest:
        raise ValueError(f"{name} is {values}; expected {count} numbers from {smallest} on")


def divides(name: str, parts: int, whole: int) -> None:
    """Check that the argument `name`, which is `parts`, divides a dimension of `whole`."""
    if parts < 1 or whole % parts:
        raise ValueError(f"{name}: {parts} does not divide {whole}")


def norm(
    x: Tensor,
    tail: Tensor | None,
    out: Tensor | None,
    border: int,
    codes: Tensor | None,
    saturated: Tensor | None,
    **scales: Tensor | None,
) -> None:
    """Check what both norms have: tail, buffer, border, codes `[C]` and their counters `[2]`."""
    video(x=x)
    batch, channels, _, *sides = x.shape
    vectors(x, channels, **scales)
    if (codes is None) != (saturated is None):
        raise ValueError("only one of codes and saturated is given; expected both or none")
    fit(x, (channels,), (torch.float32,), codes=codes)
    fit(x, (2,), (torch.int64,), saturated=saturated)
    least("border", border, 0)
    dtype = x.dtype
    if codes is not None:
        dtype = code_dtype(x.device) if out is None else out.dtype
        one_of("out", dtype, CODES)
    fit(x, (batch, channels, "K", *sides), (dtype,), tail=tail)
    fit(x, shapes.window(x, tail, border), (dtype,), out=out)


def convolution(
    x: Tensor,
    weight: ConvWeight,
    stride: tuple[int, ...] = (1, 1, 1),
    padding: tuple[int, ...] = (0, 0),
    tail: Tensor | None = None,
) -> shapes.Shape:
    """Check weight and options of a convolution of `x`, and return the result's shape."""
    batch, channels, _, *sides = x.shape
    coded = x.dtype in CODES
    flat = weight.ndim == 4 and not coded
    taps = ("kh", "kw") if flat else ("kt", "kh", "kw")
    fit(x, ("C_out", channels, *taps), (torch.int8 if coded else x.dtype,), weight=weight)
    each("the shape of weight", weight.shape, weight.ndim, 1)
    each("stride", stride, 3, 1)
    each("padding", padding, 2, 0)
    if flat and (stride[0] > 1 or tail is not None):
        raise ValueError("stride in time and tail are for a weight [C_out, C, kt, kh, kw]")
    fit(x, (batch, channels, "K", *sides), tail=tail)
    result = shapes.convolved(x, weight.shape, stride, padding, tail)
    if min(*sides, *result[3:] if flat else result[2:]) < 1:
        kernel = list(weight.shape[2:])
        raise ValueError(f"x is {list(x.shape)}; expected {kernel} or more with its padding")
    return result


def shuffle(x: Tensor, size: tuple[int, ...], order: str) -> None:
    """Check the block size of a pixel shuffle, and the order of its indices."""
    each("size", size, 3, 1)
    if sorted(order) != sorted("cthw"):
        raise ValueError(f"order is {order!r}; expected the letters c, t, h, w")
    divides("size", prod(size), x.shape[1])
