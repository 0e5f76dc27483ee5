"""The convolutions of PyTorch's libraries: oneDNN on a CPU, cuDNN or MIOpen on a GPU."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import TRIED, Launch
from ..devices import device_kind, device_name
from ..errors import Refusal, is_out_of_memory, log_failure
from ..ready.seen import device_of
from ..shapes import as_frames, as_video, has_gaps
from . import cudnn, onednn, sliced
from .fused import Fused, sum_of
from .weight import ConvWeight, channels_last

# cuDNN's tensor-core kernels for NHWC take multiples of this many channels; with the 3 or 12 of a
# picture it converts layouts or uses no tensor cores. Zeros fill the rest.
_ALIGNED = ("nvidia", "amd")
_CHANNELS = 8

# Convolutions that a library lacks, which slices replace: device, dtype, shape of the weight and
# stride.
_missing: set[tuple[torch.device, torch.dtype, tuple[int, ...], tuple[int, ...]]] = set()


def refuse(_: Tensor) -> None:
    """Refuse nothing: PyTorch has convolutions for every device."""


def launches() -> Mapping[str, Launch]:
    """Return the launches by op."""
    return {"conv3d": conv3d, "int8_conv3d": onednn.int8_conv3d}


def fuses(weight: ConvWeight) -> Fused:
    """Return what is fused for `weight` `[C_out, C, ...]`."""
    # oneDNN adds everything. On CUDA, PyTorch adds even a bias in a separate pass after cuDNN, slow
    # in channels-last memory.
    device = device_of(weight)
    packs = weight.keeps and onednn.serves(device, weight.dtype)
    return Fused(sums=packs, bias=device.type == "cpu" and not _aligns(weight))


def conv3d(x: Tensor, weight: ConvWeight, *terms: Any) -> Tensor:  # noqa: ANN401
    """Convolve a video, or each of its frames; `terms` are the others of `SIGNATURES`."""
    bias, residual, residual_bias, _, tail, out, stride, padding, _ = terms
    # Dense, because oneDNN ignores its stride.
    bias = sum_of(bias, residual_bias, x.dtype)
    bias = None if bias is None else bias.flatten().to(x.dtype).contiguous()
    flat = weight.ndim == 4
    adds = weight.keeps and onednn.serves(x.device, x.dtype)
    if not adds and (residual is not None or out is not None):
        raise Refusal("oneDNN does not serve, which was to add the terms")
    if _missing and (x.device, x.dtype, weight.shape, stride) in _missing:
        # Without terms, which `fuses` leaves to the caller on a GPU.
        return sliced.convolve(x, weight, tail, stride, padding)
    given = out
    if flat:
        window, steps, pads = as_frames(x), stride[1:], padding
        over = out is residual
        residual = None if residual is None else as_frames(residual)
        # Frames of several videos in longer buffers have no common stride.
        out = None if out is None or has_gaps(out) else residual if over else as_frames(out)
    else:
        window, steps, pads = x if tail is None else torch.cat([tail, x], 2), stride, (0, *padding)
    try:
        if adds:
            y = onednn.convolve(window, weight, bias, steps, pads, residual, out)
        elif _aligns(weight):
            taps = weight.laid_out("aligned", _aligned)
            y = cudnn.convolve(_wide(window, taps.shape[1]), taps, None, steps, pads)
            y = channels_last(y[:, : weight.shape[0]])
        else:
            # On a CPU, PyTorch's own product for float64 and float16 returns channels first.
            y = channels_last(cudnn.convolve(window, weight.plain(), bias, steps, pads))
    except RuntimeError as error:
        if flat or device_kind(x.device) not in TRIED or is_out_of_memory(error):
            raise
        log_failure("aten", "conv3d", device_name(x.device), error)
        _missing.add((x.device, x.dtype, weight.shape, stride))
        return sliced.convolve(x, weight, tail, stride, padding)
    y = as_video(y, x.shape[0]) if flat else y
    return y if given is None or out is not None else given.copy_(y)


def _aligns(weight: ConvWeight) -> bool:
    """Return whether channels are filled up: in 16 bits, at the ends of a network."""
    outputs, inputs, *_ = weight.shape
    if outputs % _CHANNELS == inputs % _CHANNELS == 0 or weight.dtype.itemsize > 2:
        return False
    return device_kind(device_of(weight)) in _ALIGNED


def _aligned(taps: Tensor) -> Tensor:
    """Return `taps` `[C_out, C, ...]` with zeros up to multiples of `_CHANNELS` channels."""
    outputs, inputs = (-(-channels // _CHANNELS) * _CHANNELS for channels in taps.shape[:2])
    wide = taps.new_zeros(outputs, inputs, *taps.shape[2:])
    wide[: taps.shape[0], : taps.shape[1]] = taps
    return channels_last(wide)


def _wide(x: Tensor, channels: int) -> Tensor:
    """Return `x` `[B, C, ...]`, channels-last, with zeros up to `channels` channels."""
    missing = channels - x.shape[1]
    return F.pad(x.movedim(1, -1), (0, missing)).movedim(-1, 1) if missing else x
