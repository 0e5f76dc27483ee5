"""The convolution of codes by oneDNN on x86, with the zero of the codes as its zero point."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..codes import ZERO
from ..errors import Refusal
from ..shapes import new_video
from . import onednn
from .terms import sum_of
from .weight import ConvWeight

# Dtypes that oneDNN writes.
WRITES = (torch.float32, torch.bfloat16)


def int8_conv3d(
    x: Tensor,
    weight: ConvWeight,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Convolve codes in uint8; the residual is added after the first rounding."""
    if scale is None or dtype not in WRITES or x.dtype != torch.uint8:
        raise Refusal("oneDNN reads uint8, and writes float32 and bfloat16")
    if reason := missing(x.device):
        raise Refusal(reason)
    bias = sum_of(bias, residual_bias, torch.float32)
    y = _product(x, weight, scale, bias, dtype)
    if residual is not None:
        return torch.add(y, residual, out=y if out is None else out)
    return y if out is None else out.copy_(y)


def missing(device: torch.device) -> str:
    """Return why oneDNN does not convolve codes exactly on `device`; empty: it does."""
    if not onednn.serves(device, torch.float32):
        return "oneDNN's int8 convolutions are for x86"
    if not hasattr(torch.ops.onednn, "qconv_pointwise"):
        return "this version of PyTorch has no int8 convolution by oneDNN"
    if not _is_exact():
        return "this CPU sums int8 products in 16 bits, because it has no VNNI"
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
