"""Adapters with a delta of small factors: LoRA, LoHa, LoKr and GLoRA.

A factor can itself be a product. Two tensors are `a @ b`; three are a Tucker decomposition with a
core `t` that holds the kernel of a convolution: `sum over i, j of a[i, out] * b[j, in] * t[i, j,
...]` (Yeh et al., "Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model
Evaluation", arXiv 2309.14859, section 3 and appendix).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Adapter, Additive, as_matrix, decompose, misfit_of_dora, spell


@dataclass(frozen=True, eq=False, kw_only=True)
class Pair(Additive):
    """LoRA: `delta = scale * up @ down` (Hu et al., arXiv 2106.09685, section 4.1)."""

    kind: ClassVar[str] = "lora"

    down: Tensor  # `[rank, in]`, for a convolution `[rank, in, ...]` with its kernel
    up: Tensor  # `[out, rank]`
    mid: Tensor | None = None  # LoCon's kernel `[rank, rank, ...]`; then `down` has none
    reshape: tuple[int, ...] | None = None  # the weight is padded with zeros to this shape

    @property
    def _delta_shape(self) -> tuple[int, ...]:
        if self.mid is None:
            return (self.up.shape[0], *self.down.shape[1:])
        return (self.up.shape[0], as_matrix(self.down.shape)[1], *self.mid.shape[2:])

    def grown(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return `reshape` if the file has it, otherwise `shape`."""
        return tuple(shape) if self.reshape is None else self.reshape

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        if self.reshape is not None and (
            len(shape) != len(self.reshape)
            or any(size > target for size, target in zip(shape, self.reshape, strict=True))
        ):
            return f"reshape_weight is {spell(self.reshape)}; the weight is {spell(shape)}"
        return super()._misfit(shape)

    def _accumulate(self, out: Tensor, factor: float) -> None:
        matrix = out.view(as_matrix(out.shape))
        up = self.up.to(out.device, out.dtype)
        down = self.down.to(out.device, out.dtype).flatten(1)
        if self.mid is None:
            matrix.addmm_(up, down, alpha=factor)
        else:
            kernel = _tucker(up.mT, down, self.mid.to(out.device, out.dtype))
            matrix.add_(kernel.flatten(1), alpha=factor)


@dataclass(frozen=True, eq=False, kw_only=True)
class Hadamard(Additive):
    """LoHa: `delta = scale * w1 * w2`, elementwise (arXiv 2309.14859; FedPara, 2108.06098)."""

    kind: ClassVar[str] = "loha"

    w1: tuple[Tensor, ...]  # one product: `a, b` or, with a Tucker core, `a, b, t`
    w2: tuple[Tensor, ...]

    @property
    def _delta_shape(self) -> tuple[int, ...]:
        return product_shape(self.w1)

    def _accumulate(self, out: Tensor, factor: float) -> None:
        first, second = _product(self.w1, out), _product(self.w2, out)
        out.view(as_matrix(out.shape)).addcmul_(first, second, value=factor)


# Each kernel position of a convolution has its own `kron`. Flattened, that is `delta[o1, o2, i1, i2
# and kernel] = w1[o1, i1] * w2[o2, i2 and kernel]` for any number of kernel dimensions. ComfyUI
# multiplies 3-D kernels differently, which does not reproduce the trained delta.
@dataclass(frozen=True, eq=False, kw_only=True)
class Kronecker(Additive):
    """LoKr: `delta = scale * kron(w1, w2)` (arXiv 2309.14859, section 3)."""

    kind: ClassVar[str] = "lokr"

    w1: tuple[Tensor, ...]  # whole, or its factors `a, b`
    w2: tuple[Tensor, ...]  # whole, or its factors `a, b` or `a, b, t`

    @property
    def _delta_shape(self) -> tuple[int, ...]:
        first, second = product_shape(self.w1), product_shape(self.w2)
        return (first[0] * second[0], first[1] * second[1], *second[2:])

    def _accumulate(self, out: Tensor, factor: float) -> None:
        # The product is added as it is computed and never stored.
        first, second = _product(self.w1, out), _product(self.w2, out)
        parts = out.view(first.shape[0], second.shape[0], first.shape[1], second.shape[1])
        parts.addcmul_(first[:, None, :, None], second[None, :, None, :], value=factor)


# Files store the pairs `A` and `B` in two layouts, which may depend on the weight: `A = a1 @ a2, B
# = b1 @ b2`, or, in older files, `A = a2 @ a1, B = b2 @ b1`. In the first, `A` mixes the channels
# of a convolution at each kernel position; in the second, channels and positions together.
@dataclass(frozen=True, eq=False, kw_only=True)
class GLoRA(Adapter):
    """GLoRA: `delta = scale * (weight @ A + B)` (Chavan et al., arXiv 2306.07967, equation 10)."""

    kind: ClassVar[str] = "glora"

    a1: Tensor
    a2: Tensor
    b1: Tensor
    b2: Tensor
    alpha: float | None = None
    dora_scale: Tensor | None = None

    @property
    def layouts(self) -> tuple[bool, bool]:
        """Whether the four tensors have one common rank in the first and in the older layout."""
        first = self.b2.shape[0] == self.b1.shape[1] == self.a1.shape[1] == self.a2.shape[0]
        older = self.b2.shape[1] == self.b1.shape[0] == self.a1.shape[0] == self.a2.shape[1]
        return first, older

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        a1, a2, b1, b2 = (as_matrix(part.shape) for part in self._factors)
        if self._is_older(shape):
            delta, inputs = (b2[0], b1[1]), (a2[0], a1[1])
            expected = as_matrix(shape)[1]
        else:
            delta, inputs = (b1[0], b2[1]), (a1[0], a2[1])
            expected = shape[1] if len(shape) > 1 else 0
        if delta != as_matrix(shape):
            return f"delta is {spell(delta)}; the weight is {spell(shape)}"
        if inputs != (expected, expected):
            return f"a1 and a2 are for {spell(inputs)} inputs; the weight is {spell(shape)}"
        return misfit_of_dora(self.dora_scale, shape)

    def _changed(self, working: Tensor, strength: float) -> Tensor:
        a1, a2, b1, b2 = (
            part.to(working.device, working.dtype).flatten(1) for part in self._factors
        )
        matrix = working.view(as_matrix(working.shape))
        rank = self.a2.shape[0]
        if self._is_older(working.shape):
            rank = self.a1.shape[0]
            delta = torch.addmm(b2 @ b1, matrix @ a2, a1)
        elif working.ndim == 2:
            delta = torch.addmm(b1 @ b2, matrix @ a1, a2)
        else:
            positions = working.flatten(2)  # [out, in, kernel]
            delta = b1 @ b2 + (a2.mT @ (a1.mT @ positions)).flatten(1)
        scale = 1.0 if self.alpha is None else self.alpha / rank
        delta = delta.view_as(working)
        if self.dora_scale is not None:
            return decompose(working, delta.mul_(scale), self.dora_scale, strength)
        return working.add_(delta, alpha=strength * scale)

    @property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.a1, self.a2, self.b1, self.b2

    def _is_older(self, shape: Sequence[int]) -> bool:
        """Return whether the layout is the older one; the weight decides if both are possible."""
        first, older = self.layouts
        if not (first and older):
            return older
        return len(shape) > 1 and self.a2.shape[0] == shape[0] == shape[1]


def product_shape(factors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape `[out, in, ...]` of the product of one, two or three `factors`."""
    if len(factors) == 3:
        a, b, t = factors
        return (a.shape[1], b.shape[1], *t.shape[2:])
    return (factors[0].shape[0], *factors[-1].shape[1:])


def _product(factors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the product of the factors `[out, -1]`, with device and dtype of `like`."""
    here = [factor.to(like.device, like.dtype) for factor in factors]
    if len(here) == 3:
        return _tucker(*here).flatten(1)
    return here[0].flatten(1) if len(here) == 1 else here[0] @ here[1].flatten(1)


def _tucker(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Return the kernel `[out, in, ...]` of `[i, out]`, `[j, in]` and the core `[i, j, ...]`."""
    half = torch.einsum("io,ij...->oj...", a, t)
    return torch.einsum("oj...,jn->on...", half, b)
