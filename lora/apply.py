"""The two forms of a LoRA's delta, the two ways to apply it to a layer, and their cost.

Adding it to the weight (`stream`) costs a product of the size of the weight for any number of
tokens; the bypass costs two narrow products per token. Counted in bytes both cost the same for

    n = c * in * out / (in + 2 * out)

tokens: the `in * out` elements of a weight are read and written c / 2 times; for a token `in`
elements are read, `out` are read and written.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .adapters import WeightFunction
from .keys import Offset

ApplyMode = Literal["auto", "stream", "bypass"]

# `c`: a weight is read and written twice, as by `torch.addmm`. The best value differs by a factor
# of two between layers; if this is wrong by 40 %, a layer's LoRA takes at most 1.4 times as long.
_WEIGHT_PASSES = 4


def break_even(inner: int, out: int) -> float:
    """Return the tokens above which `stream` is faster, for `inner` inputs and `out` outputs."""
    return _WEIGHT_PASSES * inner * out / (inner + 2 * out)


@dataclass(frozen=True)
class JoinedPairs:
    """The joined pairs of a layer, or the active rows of them."""

    down: Tensor
    up: Tensor
    amounts: Tensor  # `[rank]` in float32: scale times strength of each row
    part: Offset | None = None  # what it changes; None: the whole weight

    def into_weight(self, weight: Tensor, *, owned: bool) -> Tensor:
        """Return `weight + up @ diag(amounts) @ down`, rounded once, in its memory if `owned`."""
        up = self.up.to(weight.dtype)
        down = (self.down * self.amounts[:, None]).to(weight.dtype)
        if not owned and self.part is None:
            return torch.addmm(weight.flatten(1), up, down).view_as(weight)
        result = weight if owned else weight.clone()
        part = result if self.part is None else result.narrow(*self.part)
        if part.is_contiguous():
            part.flatten(1).addmm_(up, down)
        else:
            part.copy_(torch.addmm(part.flatten(1), up, down).view_as(part))
        return result

    def bypass(self, y: Tensor, x: Tensor) -> Tensor:
        """Return `y + x @ (up @ diag(amounts) @ down).T`, in the memory of `y` if possible."""
        if self.part is not None and self.part[0] == 1:
            x = x.narrow(-1, *self.part[1:])
        tokens = x.reshape(-1, x.shape[-1]).to(self.down.dtype)
        narrow = F.linear(tokens, self.down)
        narrow = (narrow * self.amounts).to(self.up.dtype)
        rows = None if self.part is None or self.part[0] != 0 else self.part[1:]
        wants_gradient = torch.is_grad_enabled() and (y.requires_grad or x.requires_grad)
        if self.up.dtype != y.dtype or not y.is_contiguous() or wants_gradient:
            delta = F.linear(narrow, self.up).to(y.dtype)
            if rows is None:
                return y + delta.view(y.shape)
            y = y.clone()
            y.narrow(-1, *rows).add_(delta.view(*y.shape[:-1], rows[1]))
            return y
        flat = y.view(-1, y.shape[-1])
        part = flat if rows is None else flat.narrow(1, *rows)
        part.addmm_(narrow, self.up.T)
        return y


@dataclass(frozen=True)
class ScaledFunction:
    """A change of a weight that is not a plain pair, on any device, with the user's factor."""

    function: WeightFunction
    strength: float
    part: Offset | None = None  # what it changes; None: the whole weight

    def into_weight(self, weight: Tensor, *, owned: bool) -> Tensor:
        """Return `weight` `[out, in, ...]` with the change; a new tensor, whatever `owned` is."""
        del owned
        if self.part is None:
            return self.function.apply(weight, self.strength)
        result = weight.clone()
        part = result.narrow(*self.part)
        part.copy_(self.function.apply(part, self.strength))
        return result

    def bypass(self, y: Tensor, x: Tensor) -> Tensor | None:
        """Return `y + x @ delta.T`; None: the change depends on the weight, or is of a part."""
        if self.part is not None or not self.function.adds:
            return None
        zeros = torch.zeros(y.shape[-1], x.shape[-1], dtype=y.dtype, device=y.device)
        return y + F.linear(x.to(y.dtype), self.function.apply(zeros, self.strength))

    def into_output(self, y: Tensor) -> Tensor | None:
        """Return the output `y` `[..., out]` with the difference of a bias; None: it is none."""
        if self.part is not None or not self.function.adds or len(self.function.tensors) != 1:
            return None
        delta = self.function.on(y.device)[0].to(y.dtype)
        if not y.is_contiguous() or (torch.is_grad_enabled() and y.requires_grad):
            return y.add(delta, alpha=self.strength)
        return y.add_(delta, alpha=self.strength)
