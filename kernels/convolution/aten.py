"""The convolutions of PyTorch's libraries: oneDNN on a CPU, cuDNN or MIOpen on a GPU."""

from typing import Any

import torch
from torch import Tensor

from ..backends import TRIED
from ..devices import device_kind
from ..errors import is_out_of_memory
from ..ready import serving
from ..ready.selfcheck import log_failure
from . import cudnn, onednn, sliced
from .compose import sum_of
from .fused import Fused
from .onednn_int8 import int8_conv3d as int8_conv3d
from .weight import ConvWeight, channels_last

# cuDNN's tensor-core kernels for NHWC take multiples of this many channels; with the 3 or 12 of a
# picture it converts layouts or uses no tensor cores. Zeros fill the rest.
_ALIGNED = ("nvidia", "amd")
_CHANNELS = 8

# Convolutions that a library lacks, which slices replace: device, dtype, shape of the weight and
# stride.
_missing: set[tuple[torch.device, torch.dtype, tuple[int, ...], tuple[int, ...]]] = set()


def fuses(
    x: Tensor, weight: ConvWeight, stride: tuple[int, ...], padding: tuple[int, int], *, norm: bool
) -> Fused:
    """Return what is fused for `x` `[B, C, ...]`, `weight`, `stride`, `padding` and `norm`."""
    # oneDNN adds everything. On CUDA, PyTorch adds even a bias in a separate pass after cuDNN, slow
    # in channels-last memory.
    device = serving.device_of(x)
    packs = weight.keeps and onednn.serves(device, x.dtype)
    return Fused(sums=packs, bias=device.type == "cpu" and not _aligns(x, weight))


def conv3d(
    x: Tensor,
    weight: ConvWeight,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, int],
    tail: Tensor | None = None,
    **terms: Any,  # noqa: ANN401, residual, residual_bias and out
) -> Tensor:
    """Run `conv3d(x, weight, bias, stride, padding, tail, terms)`; `x` is `[B, C, T, H, W]`."""
    kind = x.device, x.dtype, weight.shape, stride
    if kind not in _missing:
        window = x if tail is None else torch.cat([tail, x], dim=2)
        try:
            return conv2d(window, weight, bias, stride=stride, padding=(0, *padding), **terms)
        except RuntimeError as error:
            if device_kind(x.device) not in TRIED or is_out_of_memory(error):
                raise
            log_failure("aten", "conv3d", x.device, error)
        _missing.add(kind)
    # Without terms, which `fuses` leaves to the caller on a GPU.
    return sliced.conv3d(x, weight, stride=stride, padding=padding, tail=tail)


def conv2d(
    x: Tensor,
    weight: ConvWeight,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    gamma: None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve frames, or a video with its padding in time."""
    bias = sum_of(bias, residual_bias, x.dtype)
    # Dense, because oneDNN ignores its stride.
    bias = None if bias is None else bias.flatten().to(x.dtype).contiguous()
    if weight.keeps and onednn.serves(x.device, x.dtype):
        return onednn.convolve(x, weight, bias, stride, padding, residual, out)
    if not _aligns(x, weight):
        # On a CPU, PyTorch's own product for float64 and float16 returns channels first.
        return channels_last(cudnn.convolve(x, weight.plain(), bias, stride, padding))
    taps = weight.laid_out("aligned", _aligned)
    y = cudnn.convolve(_wide(x, taps.shape[1]), taps, None, stride, padding)
    return channels_last(y[:, : weight.shape[0]])


def _aligns(x: Tensor, weight: ConvWeight) -> bool:
    """Return whether channels are filled up: in 16 bits, at the ends of a network."""
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    odd = any(channels % _CHANNELS for channels in weight.shape[:2])
    return odd and narrow and device_kind(serving.device_of(x)) in _ALIGNED


def _aligned(taps: Tensor) -> Tensor:
    """Return `taps` `[C_out, C, ...]` with zeros up to multiples of `_CHANNELS` channels."""
    outputs, inputs = (-(-channels // _CHANNELS) * _CHANNELS for channels in taps.shape[:2])
    wide = taps.new_zeros(outputs, inputs, *taps.shape[2:])
    wide[: taps.shape[0], : taps.shape[1]] = taps
    return channels_last(wide)


def _wide(x: Tensor, channels: int) -> Tensor:
    """Return `x` `[B, C, ...]`, channels-last, with zeros up to `channels` channels."""
    batch, count, *sizes = x.shape
    if count == channels:
        return x
    wide = x.new_zeros(batch, *sizes, channels).movedim(-1, 1)
    wide[:, :count] = x
    return wide
