"""Convolutions of oneDNN on x86: blocked weights, a fused sum, narrow results, and int8."""

import functools
import platform
from typing import Any

import torch
from torch import Tensor

from ..codes import ZERO
from ..constraints import is_dense, refuse_overlap
from ..errors import Refusal
from ..shapes import channels_last_order, new_video
from .fused import sum_of
from .weight import ConvWeight, channels_last

# oneDNN's own weight layouts exist on x86 only; on Arm other libraries run under its name.
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")

# A convolution to few channels leaves most of a vector of 16 unused: 96 to 3 channels ran at a
# seventh of the speed of 96 to 96. So 4 neighbours in a row become one pixel of four times as many
# channels: 10.5 ms instead of 18.9 for 2 x 192 x 192 in bf16, 40 instead of 63 in fp32.
_SPREAD = 4
_VECTOR = 16

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
    steps, ones = stride, (1,) * len(stride)
    spreads = residual is None and _spreads(x, weight, stride, pads)
    if spreads:
        bias, steps = None if bias is None else bias.repeat(_SPREAD), (*stride[:-1], _SPREAD)

    def blocked(plain: Tensor) -> Tensor:
        taps = _spread(plain) if spreads else plain
        return torch.ops.mkldnn._reorder_convolution_weight(
            taps, pads, steps, ones, 1, list(x.shape)
        )

    taps = weight.laid_out(("onednn", spreads), blocked)
    # It adds to dense memory only: to zeros for a result without a residual.
    if out is not None and _is_whole(out) and _is_whole(residual):
        target = (
            out.zero_() if residual is None else out if out is residual else out.copy_(residual)
        )
    elif residual is not None:
        target = residual.clone(memory_format=channels_last_order(x.ndim))
    else:
        y = torch.ops.mkldnn._convolution_pointwise(
            x, taps, bias, pads, steps, ones, 1, "none", [], ""
        )
        y = _unfolded_columns(y) if spreads else y
        return y if out is None else out.copy_(y)
    torch.ops.mkldnn._convolution_pointwise_.binary(
        _folded_columns(target) if spreads else target,
        *(x, taps, bias, pads, steps, ones, 1, "add", 1.0, None, [], None),
    )
    return target if out is None or target is out else out.copy_(target)


def _spreads(x: Tensor, weight: ConvWeight, stride: tuple[int, ...], pads: tuple[int, ...]) -> bool:
    """Return whether neighbours in a row are computed as one pixel; see `_SPREAD`."""
    outputs, *_, columns = weight.shape
    fits = (columns, stride[-1], pads[-1]) == (3, 1, 1) and x.shape[-1] % _SPREAD == 0
    return fits and outputs * _SPREAD <= _VECTOR


def _is_whole(x: Tensor | None) -> bool:
    """Return whether `x` `[B, C, ...]`, if any, is one dense block in channels-last memory."""
    return x is None or is_dense(x, 0, *range(2, x.ndim), 1)


def _spread(taps: Tensor) -> Tensor:
    """Return the taps for `_SPREAD` neighbours in a row at once, as channels."""
    wide = taps.new_zeros(_SPREAD, *taps.shape[:-1], taps.shape[-1] + _SPREAD - 1)
    for at in range(_SPREAD):
        wide[at, ..., at : at + taps.shape[-1]] = taps
    return channels_last(wide.flatten(0, 1))


def _unfolded_columns(spread: Tensor) -> Tensor:
    """View `[B, 4 * C, ..., W / 4]` as `[B, C, ..., W]`; see `_SPREAD`."""
    rows = spread.movedim(1, -1)
    return rows.unflatten(-1, (_SPREAD, -1)).flatten(-3, -2).movedim(-1, 1)


def _folded_columns(x: Tensor) -> Tensor:
    """View `[B, C, ..., W]` as `[B, 4 * C, ..., W / 4]`; see `_SPREAD`."""
    rows = x.movedim(1, -1)
    return rows.unflatten(-2, (-1, _SPREAD)).flatten(-2, -1).movedim(-1, 1)


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
