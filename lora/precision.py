"""How much of a delta survives when it is added to a weight in bfloat16 or float16.

A weight is a multiple of its spacing `u`, the distance to the next number of the dtype, and so is
the rounded sum. A small delta `d` is therefore rounded to a multiple of `u`, mostly to 0. For
normally distributed deltas with standard deviation `s`, Stein's lemma gives the part of the sum
that follows the delta, `E[d * round(d)] / E[d * d]`:

    sum over all integers k of u * density((k + 1/2) * u / s) / s

It is 1 for `u << s`, and the mean over the weights is the share that survives.
"""

import math

import torch
from torch import Tensor

from .substitution import is_plain

# Smallest share with which `auto` adds a delta to the weight. Below it, a LoRA visibly loses
# strength: for bfloat16 weights and deltas of 0.3 % of them, 93 % survive.
LEAST_KEPT = 0.97

# Random vectors for the estimate of the size of a delta.
PROBES = 8

# Numbers of a weight that stand for all, read as runs so that few pages of a file are touched.
_RUNS, _RUN = 16, 64
_SHIFT = 104729  # a prime

# Spacing in units of the deviation, below which the sum is 1.
_FINE = 0.5
_TERMS = 9


def kept(sample: Tensor, rms: float, dtype: torch.dtype) -> float:
    """Return the share of a delta that survives being added to weights in `dtype`.

    Args:
        sample: `[n]`, some of the weights, float32 on the host.
        rms: Root mean square of the delta.
        dtype: Dtype of the sum.

    Returns:
        A share from 0 to 1; 1 for float32 and wider, and without a delta.
    """
    if dtype not in (torch.bfloat16, torch.float16) or rms <= 0:
        return 1.0
    limits = torch.finfo(dtype)
    exponents = torch.frexp(sample.abs().clamp(min=limits.tiny))[1]
    spacing = torch.exp2(exponents.double() - 1) * (limits.eps / rms)
    places = (torch.arange(_TERMS) + 0.5)[:, None] * spacing
    shares = 2 * spacing * torch.exp(-places.square() / 2).sum(0) / math.sqrt(2 * math.pi)
    return float(torch.where(spacing < _FINE, 1.0, shares).mean().clamp(max=1.0))


def rms_of_pair(down: Tensor, up: Tensor) -> float:
    """Estimate the root mean square of `up @ down`.

    The mean of `|delta @ g| ** 2` over normal random vectors `g` is the squared norm of the delta
    (Hutchinson's estimator of the trace of `delta.T @ delta`).

    Args:
        down: `[rank, in]`.
        up: `[out, rank]`.

    Returns:
        The estimate, to about a tenth for a rank of 8; the same in every process.
    """
    deltas = up.float() @ (down.float() @ probes(down.shape[1]))
    return float(deltas.square().sum() / (PROBES * up.shape[0] * down.shape[1])) ** 0.5


def probes(inner: int) -> Tensor:
    """Return normal random vectors for `rms_of_pair`, `[inner, PROBES]`."""
    return torch.randn(inner, PROBES, generator=torch.Generator().manual_seed(0))


def sample_of(weight: Tensor) -> Tensor | None:
    """Return some numbers of a weight, always the same ones.

    Args:
        weight: `[out, in, ...]`, any device.

    Returns:
        `[n]` in float32 on the host; None: it is packed, or has no values.
    """
    if not is_plain(weight):
        return _sample_of_quantised(weight)
    if not weight.is_floating_point() or weight.is_meta:
        return None
    flat = weight.detach().flatten()
    step = max(flat.numel() // _RUNS, 1)
    # At other inputs in each run: `step` is a multiple of the number of inputs of most layers.
    starts = [
        at + number * _SHIFT % max(step - _RUN, 1)
        for number, at in enumerate(range(0, flat.numel(), step))
    ]
    return torch.cat([flat[start : start + _RUN] for start in starts]).float().cpu()


def _sample_of_quantised(weight: Tensor) -> Tensor | None:
    """Return numbers of a weight of ComfyUI's `QuantizedTensor` with a scale, or one per output."""
    data = getattr(weight, "_qdata", None)
    scale = getattr(getattr(weight, "_params", None), "scale", None)
    if not (isinstance(data, Tensor) and isinstance(scale, Tensor)) or data.is_meta:
        return None
    if data.ndim != 2 or data.shape != weight.shape or scale.numel() not in (1, len(data)):
        return None
    rows = torch.arange(0, len(data), max(len(data) // _RUNS, 1), device=data.device)[:_RUNS]
    step = max(data.shape[1] // _RUN, 1)
    some = data[rows][:, ::step].float()
    scales = scale.detach().float().flatten().to(data.device)
    return (some * (scales if scales.numel() == 1 else scales[rows, None])).flatten().cpu()
