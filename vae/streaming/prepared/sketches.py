"""Numbers that every machine makes alike, and short sketches by which two results are compared.

A sketch has the sum of each 256 values with random signs. An error of a value changes its sum as
much, and errors of many values change theirs as their root mean square does, wherever they are: a
projection as of Johnson and Lindenstrauss, in place of millions of stored values.
"""

import functools
import math

import torch
from torch import Tensor

# Values of a result per sum of its sketch.
_VALUES = 256

# A prime number of random values, so that no power of two divides their period.
_PERIOD = 65537


def sketch(x: Tensor) -> Tensor:
    """Return the sketch of `x` `[B, C, T, H, W]`, which depends on the place of each value."""
    values = x.movedim(1, -1).flatten().to(torch.float64, copy=True)
    whole = values.numel() // _PERIOD * _PERIOD
    values[:whole].view(-1, _PERIOD).mul_(_signs())
    values[whole:].mul_(_signs()[: values.numel() - whole])
    whole = values.numel() // _VALUES * _VALUES
    sums, rest = values[:whole].view(-1, _VALUES).sum(1), values[whole:]
    return torch.cat([sums, rest.sum()[None]]) if rest.numel() else sums


def difference(actual: Tensor, right: Tensor) -> float:
    """Return the largest difference of two sketches over the root mean square of `right`.

    It is about the largest relative error of 256 values; infinite with NaN.
    """
    right = right.double()
    share = (actual - right).abs().max() / right.square().mean().sqrt()
    return float(share) if share.isfinite() else math.inf


def formula(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return odd multiples of 1 / 128 in (-1, 1), float32, alike on every machine and exact."""
    count = math.prod(shape)
    repeats = -(-count // _PERIOD)
    return _period().roll(-4099 * seed).repeat(repeats)[:count].view(shape)


@functools.cache
def _signs() -> Tensor:
    """Return the signs of a period."""
    return _period().sign().double()


@functools.cache
def _period() -> Tensor:
    """Return a period of the numbers: a multiplicative hash, splitmix64's, of their places."""
    with torch.inference_mode(False):
        x = torch.arange(1, _PERIOD + 1) * -7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            x = (x ^ (x >> shift)) * factor
        return (((x >> 33) & 127) * 2 - 127).float() / 128
