"""What a kernel is compiled for: calls of one variant run the same binary.

Triton compiles one for each number of channels, dtype and compile-time argument, and for sizes that
are multiples of 16; it does not distinguish other sizes. NVRTC compiles for fewer. A variant is
built and checked with generated inputs of its kind.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import SIGNATURES, Kernel
from ..convolution.weight import ConvWeight
from . import sample_inputs
from .selfcheck import Sample

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

# Ops whose second tensor has channels of its own.
_TWO_WIDTHS = frozenset({"average_down", "merge_phases"})

# Pixels of their rows: as many as a program of a larger video takes.
_WIDE = 1040

# Backends whose kernels of ops other than `conv3d` are checked, fastest first.
_CHECKED = ("triton", "cuda")


class Key(NamedTuple):
    """What the kernels of a call are compiled for."""

    op: str
    device: torch.device
    kinds: tuple[Any, ...]  # dtypes, channels and values of the arguments
    size: tuple[int, int, int] | None  # frames, height and width of a check
    kernel: Kernel | None  # of a convolution


def key_of(op: str, args: Sequence[Any], device: torch.device, kernel: Kernel | None = None) -> Key:
    """Return the variant of a call with the arguments of the launches of `op`."""
    if op == "conv3d":
        x, weight, bias, _, residual_bias, gamma, *_, stride, padding, _ = args
        vectors = (None if each is None else each.dtype for each in (bias, residual_bias, gamma))
        return Key(op, device, (x.dtype, weight.shape, *vectors, stride, padding), None, kernel)
    kinds = [each.dtype if isinstance(each, Tensor) else each for each in args]
    if op in sample_inputs.CONVERTING:
        kinds[1] = args[1].dtype, args[1].stride(1) == 1
    elif op == "int8_conv3d":
        kinds[1] = args[1].shape
    second = args[1] if op in _TWO_WIDTHS else None
    kinds += [_channels(args[0]), second if second is None else _channels(second)]
    return Key(op, device, tuple(kinds), _size(op, args), None)


def _channels(x: Tensor) -> int:
    return x.shape[1] if x.ndim == 5 else x.shape[-1]


def kernels_of(key: Key) -> tuple[str, ...]:
    """Return the backends or candidates whose kernels may serve a variant."""
    return _CHECKED if key.kernel is None else (key.kernel.backend,)


def sizes_of(op: str, args: Sequence[Any]) -> list[Sequence[Any]]:
    """Return `args` of a call of `op`, in all sizes `[...]` that differ in their variant."""
    if op != "attention":
        return [args]
    lengths = (*_PIXELS.values(), _ODD_PIXELS)
    return [[x.new_empty(x.shape[0], n, x.shape[2]) for x in args] for n in lengths]


def name_of(key: Key) -> str:
    """Return the name of the variant `key` in the store, without its device."""
    parts = [key.op, key.kernel or "", *key.kinds, key.size or ""]
    return " ".join(str(each).replace("torch.", "") for each in parts)


def samples_of(op: str, args: Sequence[Any], key: Key) -> Sample:
    """Return a function that generates the arguments by which a variant is checked."""
    # Each call returns the same numbers in new memory. It holds no memory of the given call.
    given = dict(zip(SIGNATURES[op], map(_placeholder, args), strict=True))
    if "weight" in given and op != "group_norm_silu":
        return functools.partial(sample_inputs.convolution, op, given, key.device)
    assert key.size is not None
    return functools.partial(sample_inputs.call, op, key.size, key.kinds[0], key.device, given)


def _placeholder(value: Any) -> Any:  # noqa: ANN401, any argument of an op
    """Return a tensor without memory for a tensor or weight, and other values as they are."""
    if isinstance(value, Tensor):
        shape, strides = value.shape, value.stride()
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    if isinstance(value, ConvWeight):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


def _size(op: str, args: Sequence[Any]) -> tuple[int, int, int]:
    """Return frames, height and width of a check."""
    # Odd, which also tests partial tiles, unless a kernel is compiled for multiples of 16.
    x: Tensor = args[0]
    if op == "attention":
        return 1, 1, _PIXELS.get(x.shape[1] % 32, _ODD_PIXELS)
    channels = _channels(x)
    side = math.isqrt(_ELEMENTS // (_FRAMES * channels)) | 1
    if x.ndim < 5 or (op not in _FEW_CHANNELS and channels % _MANY_CHANNELS == 0):
        return _FRAMES, side, side
    height, width = x.shape[3:]
    high = {"pixel_shuffle_3d": lambda: args[2][1], "frames_to_images": lambda: args[2]}
    if op in high and high[op]() > 1 and width % 16 == 0:  # otherwise all rows are one run
        return _FRAMES, 3, _WIDE
    return _FRAMES, 16 if height * width % 16 == 0 else 3, _WIDE + 1
