"""Convolutions of oneDNN on x86: blocked weights, a fused sum, and narrow results."""

import platform

import torch
from torch import Tensor

from ..constraints import is_dense, refuse_overlap
from ..shapes import channels_last_order
from .weight import ConvWeight, channels_last

# oneDNN's own weight layouts exist on x86 only; on Arm other libraries run under its name.
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")

# A convolution to few channels leaves most of a vector of 16 unused: 96 to 3 channels ran at a
# seventh of the speed of 96 to 96. So 4 neighbours in a row become one pixel of four times as many
# channels: 10.5 ms instead of 18.9 for 2 x 192 x 192 in bf16, 40 instead of 63 in fp32.
_SPREAD = 4
_VECTOR = 16


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
    order = channels_last_order(x.ndim)
    given, out = out, out if _is_whole(out) else None
    if given is not out or not _is_whole(residual):
        # It adds to dense memory only.
        out = residual = None if residual is None else residual.clone(memory_format=order)
    spreads = residual is None and _spreads(x, weight, stride, pads)
    target, steps, ones = out, stride, (1,) * len(stride)
    if spreads:
        bias = None if bias is None else bias.repeat(_SPREAD)
        steps, target = (*stride[:-1], _SPREAD), None if out is None else _folded_columns(out)

    def blocked(plain: Tensor) -> Tensor:
        taps = _spread(plain) if spreads else plain
        return torch.ops.mkldnn._reorder_convolution_weight(
            taps, pads, steps, ones, 1, list(x.shape)
        )

    taps = weight.laid_out(("onednn", spreads), blocked)
    if target is None and residual is None:
        y = torch.ops.mkldnn._convolution_pointwise(
            x, taps, bias, pads, steps, ones, 1, "none", [], ""
        )
        y = _unfolded_columns(y) if spreads else y
        return y if given is None else given.copy_(y)
    # It adds to existing memory: to zeros for a result without a residual.
    if residual is None:
        assert target is not None
        target.zero_()
    elif target is None:
        target = residual.clone()
    elif residual is not target:
        target.copy_(residual)
    y = torch.ops.mkldnn._convolution_pointwise_.binary(
        target, x, taps, bias, pads, steps, ones, 1, "add", 1.0, None, [], None
    )
    if given is not None and given is not out:
        return given.copy_(y)
    return out if spreads and out is not None else y


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
