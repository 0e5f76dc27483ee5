"""The int8 codes of activations after norm and SiLU, with one step per channel.

SiLU is bounded below: `silu(n) >= -0.2785`, at `n = -1.2785`. So a code is asymmetric: 17 of its
255 steps are for negative values, and the code of 0 is 17 in every channel. RMS norm gives a pixel
a root mean square of 1 by construction, so the step of a channel follows from the scale of the norm
alone: the codes end at `silu(4 gamma)`. Four deviations are the best end for normally distributed
values: 3.5 cost 1 dB more of clipped values, 5 cost 0.7 dB of wider steps
(`tests/benchmarks/LOG.md`). Group norm adds an offset, and gives a group a deviation of 1: a
channel of it can have a larger one.

Codes are uint8 on a CPU, where oneDNN multiplies uint8 with int8, and elsewhere int8, less by 128.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# The code of 0, as uint8, and the steps above it.
ZERO = 17
_ABOVE = 255 - ZERO

# The argument of the minimum of SiLU, and the deviations of a channel that codes hold.
_LOWEST, _DEVIATIONS = 1.2784645, 4.0

DTYPES = (torch.int8, torch.uint8)


def code_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of codes on `device`."""
    return torch.uint8 if device.type == "cpu" else torch.int8


def zero_of(dtype: torch.dtype) -> int:
    """Return what stands for 0 in `dtype`: a code for int8 and uint8, otherwise 0."""
    if dtype == torch.uint8:
        return ZERO
    return ZERO - 128 if dtype == torch.int8 else 0


def code_steps(gamma: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return the step between two codes of each channel, after norm and SiLU: float32 `[C]`."""
    reach = _DEVIATIONS * gamma.detach().flatten().float().abs()
    center = torch.zeros_like(reach) if shift is None else shift.detach().flatten().float()
    low, high = center - reach, center + reach
    # SiLU falls until its minimum and rises after it.
    least = F.silu(torch.maximum(low, high.clamp(max=-_LOWEST)))
    steps = torch.maximum(-least / ZERO, torch.maximum(F.silu(low), F.silu(high)) / _ABOVE)
    return steps.clamp_(min=torch.finfo(torch.float32).tiny)
