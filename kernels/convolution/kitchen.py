"""The fused convolution of comfy-kitchen, a package that ComfyUI installs, for float16 on a GPU.

`comfy_kitchen.fp16_conv3d` adds bias and residual and writes into `out`. It reads views of
channels-last videos without a copy, and most versions pad nothing. On NVIDIA GPUs it sums all
products of a value in float16, so its error grows with their number; the trial of the candidates
decides where that is exact enough. It sums in float32 on AMD and Intel GPUs.

It takes multiples of 8 channels, addresses of 16 bytes, dense results and byte offsets of 31 bits.
For other calls it runs the library's convolution silently, so they are brought into that form here,
or refused.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import shapes
from ..backends import forced
from ..constraints import is_dense, refuse_gradients, refuse_overlap, refuse_subclass
from ..errors import Refusal, first_line, is_out_of_memory, log_once
from .aten import aligned
from .compose import joined
from .fused import Fused
from .weight import ConvWeight, channels_last

_PARAMETERS = frozenset(("x", "weight", "bias", "residual", "stride", "out"))

_DEVICES = ("cuda", "xpu")

# Values of its vector loads and stores, and the bytes that they are aligned to.
_VALUES = 8
_ALIGNMENT = 16

# Values of a view from which on 31 bits do not count their bytes.
_LIMIT = 1 << 30


class _Op(NamedTuple):
    """The op of the installed version, and whether it pads."""

    call: Callable[..., Any]
    pads: bool


class _Part(NamedTuple):
    """Videos, and frames of the window and of the result, of one call."""

    videos: slice
    reads: slice
    writes: slice


def fuses(
    x: Tensor, weight: ConvWeight, stride: tuple[int, ...], padding: tuple[int, int], *, norm: bool
) -> Fused:
    """Return what a call fuses: bias and residual, but no padding in most versions.

    Args:
        x: `[B, C, T, H, W]` or `[N, C, H, W]`.
        weight: `[C_out, C, ...]`.
        stride: Stride of each dimension of the kernel.
        padding: Padding of height and width.
        norm: The call has a `gamma`.

    Returns:
        What is fused.
    """
    found = installed() if any(padding) else None
    border = any(padding) and not (isinstance(found, _Op) and found.pads)
    return Fused(sums=True, bias=True, border=border)


def may_border(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether convolutions on `device` in `dtype` may ask for frames with a border."""
    if device.type not in _DEVICES or dtype != torch.float16:
        return False
    found = installed()
    return isinstance(found, _Op) and not found.pads


def conv3d(
    x: Tensor,
    weight: ConvWeight,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...] = (1, 1, 1),
    padding: tuple[int, int] = (0, 0),
    tail: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    gamma: None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve the frames of `tail`, followed by those of `x`.

    The sum of both biases is rounded to float16. A tail, a border that the caller does not have,
    and missing channels cost one copy of the frames.

    Args:
        x: `[B, C, T, H, W]`.
        weight: `[C_out, C, kt, kh, kw]`.
        bias: `[C_out]`, or None.
        stride: Steps in frames, rows and columns.
        padding: Rows and columns of zeros around each frame.
        tail: `[B, C, K, H, W]`, or None.
        residual: `[B, C_out, T', H', W']`, or None.
        residual_bias: `[C_out]`, or None.
        gamma: None; a norm is another pass.
        out: `[B, C_out, T', H', W']`, or None.

    Returns:
        `out`, or a new tensor of its shape.
    """
    biases = [each for each in (bias, residual_bias) if each is not None]
    return _convolved(x, weight, biases, stride, padding, tail, residual, out)


def conv2d(
    x: Tensor,
    weight: ConvWeight,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    gamma: None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve frames as those of one video, with one tap in time.

    Args:
        x: `[N, C, H, W]`.
        weight: `[C_out, C, kh, kw]`.
        bias: `[C_out]`, or None.
        stride: Steps in rows and columns.
        padding: Rows and columns of zeros around each frame.
        residual: `[N, C_out, H', W']`, or None.
        residual_bias: `[C_out]`, or None.
        gamma: None; a norm is another pass.
        out: `[N, C_out, H', W']`, or None.

    Returns:
        `out`, or a new tensor of its shape.
    """
    biases = [each for each in (bias, residual_bias) if each is not None]
    residual = None if residual is None else shapes.as_video(residual)
    into = None if out is None else shapes.as_video(out)
    video = shapes.as_video(x)
    y = _convolved(video, weight, biases, (1, *stride), padding, None, residual, into)
    return y[0].transpose(0, 1) if out is None else out


def _convolved(
    x: Tensor,
    weight: ConvWeight,
    biases: list[Tensor],
    stride: tuple[int, ...],
    padding: tuple[int, int],
    tail: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Convolve `x` `[B, C, T, H, W]` in the form that the op takes, in calls that it can count."""
    _refuse_kind(x)
    op, plain = _op(), weight.plain()
    refuse_gradients(x, tail, residual, plain, *biases)
    refuse_overlap(out, x=x, tail=tail)
    refuse_overlap(out, residual=residual, same=True)
    outputs = plain.shape[0]
    unfit = any(channels % _VALUES for channels in plain.shape[:2])
    taps = plain if not unfit else weight.laid_out("aligned", aligned)
    taps = taps if taps.ndim == 5 else taps.unsqueeze(2)
    options: dict[str, Any] = {"stride": stride}
    pads = (0, *padding)
    if op.pads and any(padding):
        options["padding"] = pads
    shape = shapes.convolved(x, taps.shape, stride, pads, tail)
    window = joined(x, tail, (0, 0) if op.pads else padding, taps.shape[1])
    direct = out is not None and outputs == taps.shape[0] and is_dense(out, 2, 3, 4, 1)
    y = out if direct and out is not None else shapes.new_video(x, shape)
    bias = _vector(biases, taps.shape[0])
    added = None if residual is None else joined(residual, channels=taps.shape[0])
    _refuse_layout(window)
    _refuse_misaligned(x=window, weight=taps, bias=bias, residual=added, out=y)
    parts = list(_parts(window, taps.shape[2], stride[0], y))
    # The op launches on the current device.
    with torch.cuda.device_of(x):
        for number, (videos, reads, writes) in enumerate(parts):
            term = None if added is None else channels_last(added[videos, :, writes])
            into = y[videos, :, writes]
            read = window[videos, :, reads]
            try:
                op.call(read, taps, bias=bias, residual=term, out=into, **options)
            except Exception as error:
                # Residuals of earlier parts may be overwritten.
                if number or is_out_of_memory(error):
                    raise
                why = f"failed ({type(error).__name__}: {first_line(error)})"
                raise Refusal(_unusable(why)) from error
    if direct:
        return y
    y = y[:, :outputs]
    return channels_last(y) if out is None else out.copy_(y)


def _refuse_kind(x: Tensor) -> None:
    """Refuse devices and dtypes without a kernel, before the package is imported."""
    if x.device.type not in _DEVICES and not (x.is_cpu and forced() == "kitchen"):
        raise Refusal(f"the tensors are on {x.device.type}; kitchen needs a GPU")
    if x.dtype != torch.float16:
        raise Refusal(f"there is no kernel for {str(x.dtype).removeprefix('torch.')}")
    refuse_subclass(x)
    if not x.numel():
        raise Refusal("the tensor is empty")


def _op() -> _Op:
    found = installed()
    if isinstance(found, str):
        raise Refusal(found)
    return found


@functools.cache
def installed() -> _Op | str:
    """Return the op of the installed version, or the reason why none is usable."""
    try:
        package = importlib.import_module("comfy_kitchen")
    except ModuleNotFoundError as error:
        if error.name == "comfy_kitchen":
            return "comfy_kitchen is not installed"
        return _unusable(f"cannot be imported ({error})")
    except Exception as error:  # a broken installation raises anything
        if is_out_of_memory(error):
            raise
        return _unusable(f"cannot be imported ({type(error).__name__}: {first_line(error)})")
    call = getattr(package, "fp16_conv3d", None)
    if call is None:
        return _unusable("has no fp16_conv3d")
    try:
        names = inspect.signature(call).parameters
    except (TypeError, ValueError):  # it is compiled, or no function
        return _unusable("has an fp16_conv3d without a signature")
    if not _PARAMETERS.issubset(names):
        return _unusable("has an fp16_conv3d with other parameters")
    return _Op(call, "padding" in names)


def _unusable(what: str) -> str:
    """Log and return why the package is of no use."""
    reason = f"comfy_kitchen {what}"
    log_once(f"{reason}; slower convolutions run. Try: pip install --upgrade comfy-kitchen")
    return reason


def _vector(biases: list[Tensor], channels: int) -> Tensor | None:
    """Return the sum of `biases` `[C_out]`, with zeros up to `channels`; None without any."""
    if not biases:
        return None
    total, *others = (each.flatten() for each in biases)
    for other in others:
        total = total.float() + other.float()
    total = total.to(torch.float16).contiguous()
    lacking = channels - total.numel()
    # Both copy: to zeros behind it, and to aligned memory.
    return F.pad(total, (0, lacking)) if lacking or total.data_ptr() % _ALIGNMENT else total


def _parts(window: Tensor, taps: int, step: int, y: Tensor) -> Iterator[_Part]:
    """Divide a call into calls whose views are small enough: by videos, then by frames.

    Only dense results are written, and frames of one video are dense.

    Args:
        window: `[B, C, T, H, W]`.
        taps: Taps in time.
        step: Stride in time.
        y: `[B, C_out, T', H', W']`.

    Yields:
        The parts.

    Raises:
        Refusal: The frames of one result frame are too large.
    """
    batch, _, frames, *_ = y.shape
    whole = y.is_contiguous(memory_format=torch.channels_last_3d)
    if whole and max(_span(window), _span(y)) < _LIMIT:
        yield _Part(slice(None), slice(None), slice(None))
        return
    # Frames in a call: the first reads `taps` frames, each further one `step` more.
    most = (_LIMIT - 1 - _span(window[:1, :, :1])) // max(window.stride(2), 1) + 1
    room = min((most - taps) // step + 1, (_LIMIT - 1) // _span(y[:1, :, :1]))
    if room < 1:
        raise Refusal("the frames have more bytes than 31 bits count")
    for video in range(batch):
        for first in range(0, frames, room):
            last = min(first + room, frames)
            reads = slice(first * step, (last - 1) * step + taps)
            yield _Part(slice(video, video + 1), reads, slice(first, last))


def _span(x: Tensor) -> int:
    """Return the elements between the first and the last of `x` `[...]`, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _refuse_layout(x: Tensor) -> None:
    """Refuse `x` `[B, C, T, H, W]` with gaps in a row of pixels, or rows that are not aligned."""
    rows = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    if x.stride(1) != 1 or (x.shape[4] > 1 and x.stride(4) != x.shape[1]):
        raise Refusal("x is not channels-last")
    if any(stride % _VALUES for stride in rows if stride != 1):
        raise Refusal(f"the rows of x are not aligned to {_ALIGNMENT} bytes")


def _refuse_misaligned(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % _ALIGNMENT:
            raise Refusal(f"{name} is not aligned to {_ALIGNMENT} bytes")
