"""Weights in int8, with a scale per output channel.

The step of each channel of the codes is multiplied into the weights first. The scale ends at the
largest weight of an output channel: a smaller one, with clipped weights, gains 0.1 dB for normally
distributed weights and nothing for others.

Weights are rounded once, but not each to its nearest code. The taps of one input and one output
channel meet values of neighbouring pixels, which are similar, so their errors add up. The sum of
the taps is rounded to nearest: the weights that are nearest to a half go the other way. That is
worth 0.5 dB for random weights (`tests/benchmarks/LOG.md`).
"""

import torch
from torch import Tensor

_LARGEST = 127

# Elements of a block: the order in 64 bits needs 24 bytes for each.
_BLOCK = 1 << 22


def coded_weight(weight: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in int8, for inputs of `steps` `[C_in]`, and its scales `[C_out]`, float32.

    `sum(code * weight) * scale` is the convolution of the values, less the zeros of the codes.
    """
    shape = (1, -1, *[1] * (weight.ndim - 2))
    coded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = steps.new_empty(weight.shape[0])
    rows = max(1, _BLOCK // max(1, weight.shape[1:].numel()))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        wide = weight[part].float() * steps.view(shape)
        scale = wide.flatten(1).abs().amax(1).div_(_LARGEST)
        scale.clamp_(min=torch.finfo(torch.float32).tiny)
        exact = wide.div_(scale.view(-1, *[1] * (weight.ndim - 1)))
        coded[part] = _balanced(exact.flatten(2)).view(exact.shape).to(torch.int8)
        scales[part] = scale
    return coded, scales


def _balanced(exact: Tensor) -> Tensor:
    """Round `exact` `[C_out, C_in, taps]` so that the sums of taps are rounded to nearest."""
    codes = exact.round()
    errors = exact - codes
    missing = errors.sum(2, keepdim=True).round_()
    sign = missing.sign()
    # A tap at the end of the range stays, and so does one whose error has the other sign.
    may_move = (codes.abs() < _LARGEST) & (errors * sign > 0)
    order = (errors * sign).masked_fill_(~may_move, -1).argsort(stable=True, dim=2, descending=True)
    place = torch.empty_like(order).scatter_(2, order, _counted(order))
    return codes + sign * ((place < missing.abs()) & may_move)


def _counted(order: Tensor) -> Tensor:
    """Return 0, 1, ... along the last dimension of `order` `[C_out, C_in, taps]`."""
    return torch.arange(order.shape[2], device=order.device).expand_as(order)
