"""What the parts of one module in a LoRA file do to a weight, and the two ways to apply it.

Plain pairs are joined in a bank. Everything else is a function of the weight with its own tensors:
differences and PEFT's DoRA from here, LoHa, LoKr, OFT and the like from ComfyUI (`OtherKinds`).

Adding a delta to the weight (`stream`) costs a product of the size of the weight for any number of
tokens; the bypass costs two narrow products per token. Counted in bytes both cost the same for

    n = c * in * out / (in + 2 * out)

tokens: the `in * out` elements of a weight are read and written c / 2 times; for a token `in`
elements are read, `out` are read and written.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .keys import Offset

ApplyMode = Literal["auto", "stream", "bypass"]

# `c`: a weight is read and written twice, as by `torch.addmm`. The best value differs by a factor
# of two between layers; if this is wrong by 40 %, a layer's LoRA takes at most 1.4 times as long.
_WEIGHT_PASSES = 4


@dataclass(frozen=True, eq=False)
class WeightFunction:
    """A change of a weight, computed in float32 and rounded once; the weight is never written.

    `function` gets a copy of the weight that it may overwrite, `[out, in, ...]` in float32 or
    float64, `tensors` on its device, and the strength; it returns the new weight.
    """

    tensors: tuple[Tensor, ...]
    function: Callable[[Tensor, tuple[Tensor, ...], float], Tensor]
    adds: bool = False  # the same to any weight, so it can be added to the output of a layer

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """Return the changed weight in new memory, with the dtype of `weight` `[out, in, ...]`."""
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        working = weight.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        return self.function(working, self.on(weight.device), strength).to(weight.dtype)

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensors `[...]` on `device`; copies from pinned memory do not wait."""
        on_gpu = device.type == "cuda"
        return tuple(tensor.to(device, non_blocking=on_gpu) for tensor in self.tensors)

    def with_tensors(self, tensors: Sequence[Tensor]) -> "WeightFunction":
        """Return the same change with other `tensors` `[...]`, in the order of its own."""
        return replace(self, tensors=tuple(tensors))


@dataclass(frozen=True, eq=False)
class Pair(WeightFunction):
    """LoRA: `delta = scale * up @ down` (Hu et al., arXiv 2106.09685, section 4.1).

    Its tensors are `down` `[rank, in]`, with the kernel of a convolution in `in`, and `up`
    `[out, rank]`.
    """

    scale: float = 1.0


# Makes functions of all kinds that are not made here, from parts by their canonical names and the
# shape of the weight. Raises a ValueError with the reason if there is none.
OtherKinds = Callable[[Mapping[str, Tensor], tuple[int, ...]], WeightFunction]


def make_function(
    parts: Mapping[str, Tensor], shape: tuple[int, ...], others: OtherKinds | None = None
) -> WeightFunction:
    """Return what valid parts do to a weight of `shape`; a ValueError if no kind has them."""
    named = parts.keys() - {"alpha"}
    if named == {"diff"}:
        return WeightFunction((parts["diff"],), _add, adds=True)
    if named == {"set_weight"}:
        return WeightFunction((parts["set_weight"],), _replace)
    if named not in ({"up", "down"}, {"up", "down", "magnitude"}):
        if others is None:
            raise ValueError(f"{describe(parts)}: only ComfyUI has this kind")
        return others(parts, shape)
    up, down = parts["up"].flatten(1), parts["down"].flatten(1)
    scale = float(parts["alpha"]) / len(down) if "alpha" in parts else 1.0
    if "magnitude" not in parts:
        function = functools.partial(_add_product, scale=scale)
        return Pair((down, up), function, adds=True, scale=scale)
    tensors = down, up, parts["magnitude"].flatten()
    return WeightFunction(tensors, functools.partial(_decompose, scale=scale))


def _add(weight: Tensor, tensors: tuple[Tensor, ...], strength: float) -> Tensor:
    return weight.add_(strength * tensors[0].to(weight.dtype))


def _replace(weight: Tensor, tensors: tuple[Tensor, ...], strength: float) -> Tensor:
    """Return another weight, for any strength except 0."""
    return weight.copy_(tensors[0]) if strength else weight


def _add_product(
    weight: Tensor, tensors: tuple[Tensor, ...], strength: float, *, scale: float
) -> Tensor:
    down, up = (tensor.to(weight.dtype) for tensor in tensors)
    weight.flatten(1).addmm_(up, down, alpha=strength * scale)  # a view: it is contiguous
    return weight


def _decompose(
    weight: Tensor, tensors: tuple[Tensor, ...], strength: float, *, scale: float
) -> Tensor:
    """Return the blend of a weight and its DoRA as in PEFT, with the norms of the sum's rows.

    Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv 2402.09353, equation 5.
    """
    *pair, magnitude = tensors
    sums = _add_product(weight.clone(), tuple(pair), 1.0, scale=scale).flatten(1)
    norms = torch.linalg.vector_norm(sums, dim=1) + torch.finfo(weight.dtype).eps
    sums *= (magnitude.to(weight.dtype) / norms)[:, None]
    return weight.lerp_(sums.view_as(weight), strength)


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
        axis, *columns = self.part or (0, 0, y.shape[-1])
        if axis == 1:
            x, columns = x.narrow(-1, *columns), (0, y.shape[-1])
        narrow = F.linear(x.reshape(-1, x.shape[-1]).to(self.down.dtype), self.down)
        narrow = (narrow * self.amounts).to(self.up.dtype)
        y = y if y.is_contiguous() else y.clone(memory_format=torch.contiguous_format)
        part = y.view(-1, y.shape[-1]).narrow(1, *columns)
        if self.up.dtype == y.dtype:
            part.addmm_(narrow, self.up.T)
        else:
            part.add_(F.linear(narrow, self.up))
        return y


@dataclass(frozen=True)
class ScaledFunction:
    """A change of a weight that is not a plain pair, on any device, with the user's factor."""

    function: WeightFunction
    strength: float
    part: Offset | None = None  # what it changes; None: the whole weight

    def into_weight(self, weight: Tensor, *, owned: bool = False) -> Tensor:
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
        """Return the output `y` `[..., out]` plus the difference of a bias; None: it is none."""
        if self.part is not None or not self.function.adds or len(self.function.tensors) != 1:
            return None
        return y.add(self.function.on(y.device)[0].to(y.dtype), alpha=self.strength)


def describe(parts: Mapping[str, Tensor]) -> str:
    """Return the names and shapes of parts as text, such as "lokr_w1 3x2, lokr_w2 4x5"."""
    named = ((name, part) for name, part in sorted(parts.items()) if name != "alpha")
    return ", ".join(f"{name} {spell(part.shape)}" for name, part in named)


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return `shape` as outputs and the product of all other dimensions."""
    return shape[0], math.prod(shape[1:])


def spell(shape: Sequence[int]) -> str:
    """Return `shape` as text, such as 5120x1536."""
    return "x".join(map(str, shape)) or "a scalar"
