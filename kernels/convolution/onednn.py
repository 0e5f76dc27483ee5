"""Convolutions of oneDNN on x86: blocked weights, a fused sum, narrow results, and int8."""

import functools
import importlib
import importlib.util
import platform
from typing import Any

import torch
from torch import Tensor

from ..codes import ZERO
from ..constraints import is_dense, refuse_overlap
from ..devices import device_kind, device_name, has_bfloat16
from ..errors import Refusal
from ..shapes import channels_last_order, new_video
from .fused import sum_of
from .weight import ConvWeight

# oneDNN's own weight layouts exist on x86 only; on Arm other libraries run under its name.
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")

# Dtypes that its int8 convolution writes.
WRITES = (torch.float32, torch.bfloat16)


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN's blocked weights and fused sum support `device` and `dtype`."""
    backend = torch.backends.mkldnn
    if device.type != "cpu" or not _X86 or not backend.is_available() or not backend.enabled:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def convolve(
    x: Tensor,
    weight: ConvWeight,
    bias: Tensor | None,
    stride: tuple[int, ...],
    pads: tuple[int, ...],
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Convolve with kept blocked weights, and add bias and residual while writing."""
    refuse_overlap(out, x=x)
    refuse_overlap(out, residual=residual, same=True)
    ones = (1,) * len(stride)

    def blocked(plain: Tensor) -> Tensor:
        sizes = list(x.shape)
        return torch.ops.mkldnn._reorder_convolution_weight(plain, pads, stride, ones, 1, sizes)

    taps = weight.laid_out("onednn", blocked)
    # It adds to dense memory only: to zeros for a result without a residual.
    if out is not None and _is_whole(out) and _is_whole(residual):
        target = out.zero_() if residual is None else out
        if residual is not None and residual is not out:
            out.copy_(residual)
    elif residual is not None:
        target = residual.clone(memory_format=channels_last_order(x.ndim))
    else:
        y = torch.ops.mkldnn._convolution_pointwise(
            x, taps, bias, pads, stride, ones, 1, "none", [], ""
        )
        return y if out is None else out.copy_(y)
    torch.ops.mkldnn._convolution_pointwise_.binary(
        target, x, taps, bias, pads, stride, ones, 1, "add", 1.0, None, [], None
    )
    return target if out is None or target is out else out.copy_(target)


def _is_whole(x: Tensor | None) -> bool:
    """Return whether `x` `[B, C, ...]`, if any, is one dense block in channels-last memory."""
    return x is None or is_dense(x, 0, *range(2, x.ndim), 1)


def int8_conv3d(x: Tensor, weight: ConvWeight, scale: Tensor | None, *terms: Any) -> Tensor:  # noqa: ANN401
    """Convolve codes in uint8, whose zero is the zero point of oneDNN."""
    bias, residual, residual_bias, out, dtype = terms
    if scale is None or dtype not in WRITES or x.dtype != torch.uint8:
        raise Refusal("oneDNN reads uint8, and writes float32 and bfloat16")
    if reason := missing(x.device):
        raise Refusal(reason)
    bias = sum_of(bias, residual_bias, torch.float32)
    y = _product(x, weight, scale, bias, dtype)
    if residual is not None:  # added after the first rounding
        return torch.add(y, residual, out=y if out is None else out)
    return y if out is None else out.copy_(y)


def missing(device: torch.device) -> str:
    """Return why oneDNN does not convolve codes exactly on `device`; empty: it does."""
    if not serves(device, torch.float32):
        return "oneDNN's int8 convolutions are for x86"
    if not hasattr(torch.ops.onednn, "qconv_pointwise"):
        return "this version of PyTorch has no int8 convolution by oneDNN"
    if not _is_exact():
        return "this CPU sums int8 products in 16 bits, because it has no VNNI"
    return ""


def int8_lacks(device: torch.device, dtype: torch.dtype) -> str:
    """Return why convolutions in int8 do not pay next to layers in `dtype`; "": they do."""
    kind = device_kind(device)
    if kind == "cpu":
        # With VNNI or AMX four products of int8 take one instruction: bfloat16 takes 1.38 times as
        # long (`tests/benchmarks/LOG.md`), and float32 longer.
        written = dtype in WRITES
        name = str(dtype).removeprefix("torch.")
        reason = "" if written else f"oneDNN's int8 convolutions do not write {name}"
        return missing(device) or reason
    if kind != "nvidia":
        return f"there is no int8 convolution for {device_name(device)}"
    if importlib.util.find_spec("triton") is None:
        return "the int8 convolution of GPUs needs Triton, which is not installed"
    tiled = importlib.import_module("..triton_ops.int8_convolution", __package__)
    if not (has_bfloat16(device) and tiled.has_tiles(device)):
        return f"the int8 convolution has no tiles for {device_name(device)}"
    return ""


@functools.cache
def _is_exact() -> bool:
    """Return whether the largest products are summed exactly."""
    # Without VNNI (AVX-512 VNNI or AVX-VNNI) oneDNN sums pairs of products with VPMADDUBSW, which
    # saturates at 16 bits (oneDNN, "Nuances of int8 computations").
    shape = (1, 64, 3, 4, 4)
    x = new_video(torch.empty(0, dtype=torch.uint8), shape).fill_(255)
    weight = ConvWeight.of(torch.full((64, 64, 3, 3, 3), 127, dtype=torch.int8))
    y = _product(x, weight, torch.ones(64), None, torch.float32)
    return bool((y == (255 - ZERO) * 127 * 64 * 27).all())


def _product(
    x: Tensor, weight: ConvWeight, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `sum((x - 17) * weight) * scale + bias` in `dtype`."""
    ones, none = [1, 1, 1], [0, 0, 0]
    scale, bias = scale.flatten(), None if bias is None else bias.flatten()

    def packed(plain: Tensor) -> Tensor:
        return torch.ops.onednn.qconv_prepack(
            plain, scale, 1.0, ZERO, ones, none, ones, 1, list(x.shape)
        )

    taps = weight.laid_out("onednn int8", packed)
    zeros = torch.zeros(scale.numel(), dtype=torch.int32)
    ends: tuple[Any, ...] = (1, 1.0, 0, dtype, "none", [], None)
    return torch.ops.onednn.qconv_pointwise(
        x, 1.0, ZERO, taps, scale, zeros, bias, ones, none, ones, *ends
    )
