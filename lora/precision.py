"""Which LoRAs are too weak to be added to a weight in bfloat16 or float16.

A weight is a multiple of its spacing, the distance to the next number of the dtype, and so is the
rounded sum: a delta that is small next to the spacing is mostly rounded to 0. For normally
distributed weights and deltas half an eps of the dtype between their sizes keeps 97 % of the effect
(by Stein's lemma), a quarter 80 %, a tenth 42 %.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Smallest size of a delta that is added to a weight, in units of the weight's size and the eps.
_LEAST = 0.5

# Rows of a weight that stand for all, so that few pages of a file are read; rows and columns of a
# delta. Their step is odd: heads and channel groups have powers of two.
_ROWS, _SOME = 32, 128


def is_weak(rms: float, size: float | None, dtype: torch.dtype) -> bool:
    """Return whether rounding to `dtype` takes more than about 3 % of the effect of a delta.

    `rms` and `size` are the root mean squares of the delta and of the weight; for an unknown size
    (None) a bypass is better, too.
    """
    if torch.finfo(dtype).bits > 16 or not rms:
        return False
    return size is None or rms < _LEAST * torch.finfo(dtype).eps * size


def small_deltas(deltas: Iterable[tuple[float, float | None, torch.dtype]], mode: str) -> list[str]:
    """Return a line about the deltas that are weak for weights of known size, or none."""
    weak = [each[2] for each in deltas if each[1] is not None and is_weak(*each)]
    if not weak:
        return []
    name = str(weak[0]).removeprefix("torch.")
    if mode == "auto":
        return [f"small deltas: bypass for {len(weak)} layers, which {name} weights would lose"]
    return [f"small deltas: {name} weights lose a part in {len(weak)} layers; bypass keeps all"]


def rms_of_pair(down: Tensor, up: Tensor) -> float:
    """Estimate the root mean square of `up @ down`, `[out, rank] @ [rank, in]`, from a part."""
    columns = down[:, :: _step(down.shape[1], _SOME)].float()
    return float((up[:: _step(len(up), _SOME)].float() @ columns).square().mean()) ** 0.5


def rms_of(weight: Tensor) -> float | None:
    """Estimate the root mean square of a weight `[out, in, ...]` on any device, from some rows.

    Returns None if it is packed or has no values.
    """
    data, scale = weight, None
    if not is_plain(weight):  # ComfyUI's `QuantizedTensor`: one scale, or one per output
        data = getattr(weight, "_qdata", None)
        scale = getattr(getattr(weight, "_params", None), "scale", None)
        if not (isinstance(data, Tensor) and isinstance(scale, Tensor)):
            return None
        if data.shape != weight.shape or scale.numel() not in (1, len(data)):
            return None
    elif not weight.is_floating_point():
        return None
    if data.is_meta:
        return None
    size = float(data.detach()[:: _step(len(data), _ROWS)].float().square().mean()) ** 0.5
    return size if scale is None else size * float(scale.float().square().mean()) ** 0.5


def is_plain(weight: Tensor) -> bool:
    """Return whether a weight is PyTorch's own kind of tensor, not a quantised or packed one."""
    return type(weight) in (Tensor, nn.Parameter)


def _step(length: int, count: int) -> int:
    return -(-length // count) | 1
