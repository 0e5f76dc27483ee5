"""A bank's delta on one layer: into its weight on the way, or beside it; and what is cheaper.

Into the weight costs a product of the size of the weight, whatever the number of tokens; beside the
layer, two skinny products for every token. Counted in bytes both cost the same for

    n = c * in * out / (in + 2 * out)

tokens: the `in * out` numbers of a weight are read and written c / 2 times; of a token `in` are
read, `out` read and written. What `c` is depends on the machine and is measured
(`kernels.GPUConfig`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Mode = Literal["auto", "stream", "beside"]


@dataclass(frozen=True)
class Low:
    """The joined pairs of a layer, or the rows of them that are at work.

    Attributes:
        down: `[rank, in]`.
        up: `[out, rank]`.
        amounts: `[rank]` in float32: scale times strength, for each row.
        part: Axis, first index and length of the part of the weight that it is for; None: all.
    """

    down: Tensor
    up: Tensor
    amounts: Tensor
    part: tuple[int, int, int] | None = None


def break_even(inner: int, out: int, c: float) -> float:
    """Tokens from which on a delta is better added to the weight.

    Args:
        inner: Numbers that enter the layer, per token.
        out: Numbers that leave it.
        c: Of the machine.
    """
    return c * inner * out / (inner + 2 * out)


def into_weight(weight: Tensor, low: Low, *, owned: bool) -> Tensor:
    """Add a delta to a weight: `weight + up @ diag(amounts) @ down`.

    Args:
        weight: `[out, in, ...]`, in the dtype of the computation.
        low: The pairs.
        owned: The memory of `weight` may be the result's.

    Returns:
        The sum, rounded once; of the shape of `weight`, which is as it was but where it is owned.
    """
    result = weight if owned else weight.clone() if low.part is not None else None
    if result is None:
        flat = weight.flatten(1)
        return torch.addmm(flat, *_factors(low, weight.dtype)).view_as(weight)
    part = result if low.part is None else result.narrow(*low.part)
    if part.is_contiguous():
        part.flatten(1).addmm_(*_factors(low, weight.dtype))
    else:
        total = torch.addmm(part.flatten(1), *_factors(low, weight.dtype))
        part.copy_(total.view_as(part))
    return result


def beside(y: Tensor, x: Tensor, low: Low) -> Tensor:
    """Add what a delta makes of the input of a linear layer to its output.

    Args:
        y: `[..., out]`, written to unless a gradient is wanted or its memory is not dense.
        x: `[..., in]`, what the layer was given.
        low: The pairs.

    Returns:
        `y + x @ (up @ diag(amounts) @ down).T`, of the dtype of `y`.
    """
    if low.part is not None and low.part[0] == 1:
        x = x.narrow(-1, *low.part[1:])
    tokens = x.reshape(-1, x.shape[-1]).to(low.down.dtype)
    narrow = F.linear(tokens, low.down)
    narrow = (narrow * low.amounts).to(low.up.dtype)
    rows = None if low.part is None or low.part[0] != 0 else low.part[1:]
    if low.up.dtype != y.dtype or not y.is_contiguous() or _wants_gradient(y, x):
        delta = F.linear(narrow, low.up).to(y.dtype)
        if rows is None:
            return y + delta.view(y.shape)
        y = y.clone()
        y.narrow(-1, *rows).add_(delta.view(*y.shape[:-1], rows[1]))
        return y
    flat = y.view(-1, y.shape[-1])
    part = flat if rows is None else flat.narrow(1, *rows)
    part.addmm_(narrow, low.up.T)
    return y


def dense_beside(y: Tensor, x: Tensor, delta: Tensor, amount: float) -> Tensor:
    """As `beside`, for a delta `[out, in]` that has no narrow form."""
    return y + amount * F.linear(x.to(delta.dtype), delta).to(y.dtype)


def _factors(low: Low, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scaled = (low.down * low.amounts[:, None]).to(dtype)
    return low.up.to(dtype), scaled


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
