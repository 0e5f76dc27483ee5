"""What a kernel is compiled for: calls of one variant run the same binary.

Triton compiles one for each number of channels, dtype and compile-time argument, and for sizes that
are multiples of 16; it does not distinguish other sizes, nor tensors that can be omitted. NVRTC
compiles for fewer. A variant is built and checked with generated inputs of its kind.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..backends import CONVOLUTIONS_OPS
from ..convolution.weight import ConvWeight
from . import sample_inputs

# Elements of the activations of a check.
_ELEMENTS = 1 << 17

# Frames of a check; more than one, because the channels of a frame can come from several frames.
_FRAMES = 4

# Pixels of a check of attention by the remainder of a division by 32. The blocks of its kernels are
# multiples of 16 or 32 pixels, and the last one is checked separately. Rows of scores that are
# multiples of 8 have another softmax.
_PIXELS = {0: 1024, 8: 1000, 16: 1008, 24: 1000}
_ODD_PIXELS = 1009

# Ops whose results can have a few channels, and channels of which no part is a multiple of 16.
_FEW_CHANNELS = frozenset({"frames_to_images", "pixel_shuffle_3d"})
_MANY_CHANNELS = 32

# Pixels of their rows: as many as a program of a larger video takes.
_WIDE = 1040

Key = tuple[Any, ...]

# Functions that generate the calls by which a variant is checked.
Samples = list[Callable[[], dict[str, Any]]]


def key_of(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Key:
    """Return what the kernels of a call are compiled for: device, dtypes, channels, values."""
    x: Tensor = args[0]
    named = _named(op, args, kwargs)
    if op in CONVOLUTIONS_OPS:
        return _convolution_key(op, x, named, device)
    key: list[Any] = [op, device, x.dtype, _channels(x)]
    optional = sample_inputs.OPTIONAL.get(op, ())
    if named.get("codes") is not None:
        key.append(sample_inputs.coded_dtype(device, named))
    vectors = set()
    for name, value in named.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            key.append((name, tuple(value) if isinstance(value, list) else value))
        elif name == "out":
            if op in sample_inputs.CONVERTING:
                key.append((name, value.dtype, value.stride(1) == 1))
        elif name in sample_inputs.VECTORS:
            vectors.add(value.dtype)
            if name not in optional:
                key.append(name)
        elif name not in optional:
            key.append((name, value.dtype, _channels(value)))
    return (*key, frozenset(vectors or {x.dtype}), *_size(op, x, named))


def in_dtype(key: Key, dtype: torch.dtype) -> Key:
    """Return the variant of the convolution `key` with frames and weight in `dtype`."""
    op, device, _, _, *others = key
    return op, device, dtype, dtype, *others


def sizes_of(op: str, args: Sequence[Any]) -> list[Sequence[Any]]:
    """Return `args` of a call of `op`, in all sizes `[...]` that differ in their variant."""
    if op != "attention":
        return [args]
    lengths = (*_PIXELS.values(), _ODD_PIXELS)
    return [[x.new_empty(x.shape[0], n, x.shape[2]) for x in args] for n in lengths]


def name_of(key: Key) -> str:
    """Return the name of the variant `key` in the store, without its device."""
    parts = (sorted(map(str, each)) if isinstance(each, frozenset) else each for each in key)
    return " ".join(str(each).removeprefix("torch.") for at, each in enumerate(parts) if at != 1)


def samples_of(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Samples:
    """Return functions that generate the calls by which a variant is checked."""
    # One for each form of the call, such as without a tail. Each call of one returns the same
    # numbers in new memory. They hold no memory of the given call.
    given = {name: _placeholder(value) for name, value in _named(op, args, kwargs).items()}
    x = given["x" if "x" in given else next(iter(given))]
    if op in CONVOLUTIONS_OPS:
        return [functools.partial(sample_inputs.convolution, op, given, device)]
    size = _size(op, x, given)
    return [
        functools.partial(sample_inputs.call, op, size, x.dtype, device, form)
        for form in sample_inputs.forms(op, given)
    ]


def _placeholder(value: Any) -> Any:  # noqa: ANN401, any argument of an op
    """Return a tensor or weight without memory, and other values as they are."""
    if isinstance(value, Tensor):
        shape, strides = value.shape, value.stride()
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    if isinstance(value, ConvWeight):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


def _convolution_key(
    op: str, x: Tensor, named: Mapping[str, Any], device: torch.device
) -> tuple[Any, ...]:
    vectors = [None if (v := named.get(name)) is None else v.dtype for name in _TERMS]
    strides, padding = named.get("stride", ()), named.get("padding", ())
    dtype = named.get("dtype", x.dtype)
    weight: ConvWeight = named["weight"]
    return op, device, x.dtype, dtype, weight.shape, tuple(strides), tuple(padding), *vectors


_TERMS = ("scale", "bias", "residual_bias", "gamma")


_CONVOLUTION = ("x", "weight", "bias")
_PARAMETERS = {
    "conv2d": _CONVOLUTION,
    "conv3d": _CONVOLUTION,
    "int8_conv3d": ("x", "weight", "scale", "bias"),
}


@functools.cache
def _parameters(op: str) -> tuple[str, ...]:
    """Return the names of the arguments of `op` in order."""
    if op in _PARAMETERS:
        return _PARAMETERS[op]
    return tuple(inspect.signature(getattr(reference, op)).parameters)


def _named(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_parameters(op), args, strict=False)), **kwargs}


def _channels(x: Tensor) -> int:
    return x.shape[1] if x.ndim == 5 else x.shape[-1]


def _size(op: str, x: Tensor, given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return frames, height and width of a check."""
    # Odd, which also tests partial tiles, unless a kernel is compiled for multiples of 16.
    if op == "attention":
        return 1, 1, _PIXELS.get(x.shape[1] % 32, _ODD_PIXELS)
    channels = _channels(x)
    side = math.isqrt(_ELEMENTS // (_FRAMES * channels)) | 1
    if x.ndim < 5 or (op not in _FEW_CHANNELS and channels % _MANY_CHANNELS == 0):
        return _FRAMES, side, side
    height, width = x.shape[3:]
    high = given["size"][1] if op == "pixel_shuffle_3d" else given.get("patch", 1)
    if high > 1 and width % 16 == 0:  # otherwise all rows are one run
        return _FRAMES, 3, _WIDE
    return _FRAMES, 16 if height * width % 16 == 0 else 3, _WIDE + 1
