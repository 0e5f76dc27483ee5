"""The base class of adapters: tensors of a LoRA file that change one weight.

An adapter never writes into its input weight: adding and subtracting a delta leaves rounding
errors, so the changed weight is computed from the stored one each time, in float32, and rounded
once. DoRA, which several kinds can have, is here: Liu et al., "DoRA: Weight-Decomposed Low-Rank
Adaptation", arXiv 2402.09353.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

_A = TypeVar("_A", bound="Adapter")


@dataclass(frozen=True, eq=False, kw_only=True)
class Adapter(ABC):
    """The tensors of one module in a LoRA file, and their effect on a weight."""

    kind: ClassVar[str]

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """Return the changed weight; `weight` is not modified.

        Args:
            weight: `[out, in, ...]`, any floating dtype and device. The adapter's tensors are
                copied to its device for the call if needed.
            strength: The user's factor, of either sign; 0 keeps the values.

        Returns:
            A new, contiguous tensor with the dtype of `weight` and the shape `grown(weight.shape)`;
            computed in float32 (float64 for a float64 weight) and rounded once.

        Raises:
            ValueError: The adapter does not fit the weight.
        """
        self._check(weight.shape)
        working = self._working_copy(weight)
        if strength != 0:
            working = self._changed(working, strength)
        return working.to(weight.dtype)

    def delta(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor | None:
        """Return the delta of strength 1 `[out, in, ...]`; None: it depends on the weight."""
        del shape, dtype, device
        return None

    # A kernel can be flattened in the adapter or in the weight, and a weight can grow to fit
    # (`reshape_weight`).
    def misfit(self, shape: Sequence[int]) -> str | None:
        """Return why the adapter does not fit a weight of `shape`; None: it fits."""
        return self._misfit(tuple(shape))

    def grown(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the changed weight for a weight of `shape`."""
        return tuple(shape)

    @abstractmethod
    def _misfit(self, shape: tuple[int, ...]) -> str | None: ...

    @abstractmethod
    def _changed(self, working: Tensor, strength: float) -> Tensor:
        """Return the changed weight, in the memory of its copy `working` if possible."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the adapter's tensors `[...]` in the order of its fields."""
        values = (getattr(self, field.name) for field in fields(self))
        each = (
            item for value in values for item in (value if isinstance(value, tuple) else [value])
        )
        return tuple(item for item in each if isinstance(item, Tensor))

    def with_tensors(self: _A, tensors: Iterable[Tensor]) -> _A:
        """Return a copy with other `tensors`, each `[...]`, in the order of `tensors()`."""
        rest = iter(tensors)

        def replaced(value: object) -> object:
            if isinstance(value, tuple):
                return tuple(map(replaced, value))
            return next(rest) if isinstance(value, Tensor) else value

        return replace(
            self, **{each.name: replaced(getattr(self, each.name)) for each in fields(self)}
        )

    def to(self: _A, device: torch.device | str) -> _A:
        """Return a copy with its tensors on `device`; tensors already there are shared."""
        return self.with_tensors(tensor.to(device) for tensor in self.tensors())

    def _check(self, shape: Sequence[int]) -> None:
        if (reason := self.misfit(shape)) is not None:
            raise ValueError(f"{self.kind}: {reason}")

    def _working_copy(self, weight: Tensor) -> Tensor:
        shape, dtype = self.grown(weight.shape), _compute_dtype(weight.dtype)
        if shape == tuple(weight.shape):
            return weight.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        working = torch.zeros(shape, dtype=dtype, device=weight.device)
        working[tuple(slice(size) for size in weight.shape)] = weight.detach().to(dtype)
        return working


@dataclass(frozen=True, eq=False, kw_only=True)
class Additive(Adapter):
    """An adapter that adds the same delta to any weight, except with DoRA."""

    scale: float = 1.0
    dora_scale: Tensor | None = None  # DoRA's magnitudes, one per output or per input
    norms_of_sum: bool = False  # as `of_sum` of `decompose`

    @property
    @abstractmethod
    def _delta_shape(self) -> tuple[int, ...]:
        """`[out, in, ...]` of the delta; dimensions after `out` can be flattened in the weight."""

    @abstractmethod
    def _accumulate(self, out: Tensor, factor: float) -> None:
        """Add the unscaled delta times `factor` to `out`, contiguous and of a fitting shape."""

    def _changed(self, working: Tensor, strength: float) -> Tensor:
        if self.dora_scale is None:
            self._accumulate(working, strength * self.scale)
            return working
        delta = torch.zeros_like(working)
        self._accumulate(delta, self.scale)
        return decompose(working, delta, self.dora_scale, strength, of_sum=self.norms_of_sum)

    def delta(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor | None:
        """Return the delta for `shape` `[out, in, ...]`, `dtype` and `device`; None with DoRA."""
        if self.dora_scale is not None:
            return None
        self._check(shape)
        out = torch.zeros(self.grown(shape), dtype=_compute_dtype(dtype), device=device)
        self._accumulate(out, self.scale)
        return out.to(dtype)

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        grown = self.grown(shape)
        if as_matrix(self._delta_shape) != as_matrix(grown):
            return f"delta is {spell(self._delta_shape)}; the weight is {spell(grown)}"
        return misfit_of_dora(self.dora_scale, grown)


@dataclass(frozen=True, eq=False, kw_only=True)
class Diff(Additive):
    """A full difference of weights, also of norms and biases, with the weight's shape."""

    kind: ClassVar[str] = "diff"

    difference: Tensor

    @property
    def _delta_shape(self) -> tuple[int, ...]:
        return tuple(self.difference.shape)

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        return _unequal("delta", self.difference, shape)

    def _accumulate(self, out: Tensor, factor: float) -> None:
        out.add_(self.difference.to(out.device, out.dtype), alpha=factor)


@dataclass(frozen=True, eq=False, kw_only=True)
class Replacement(Adapter):
    """Another weight in place of the model's, for any strength except 0."""

    kind: ClassVar[str] = "set"

    value: Tensor

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        return _unequal("set_weight", self.value, shape)

    def _changed(self, working: Tensor, strength: float) -> Tensor:
        del strength
        return working.copy_(self.value)


# The direction `V` is the sum divided by the norms of its columns, and the new weight is
# `dora_scale * V` (arXiv 2402.09353, equation 5). This is ComfyUI's convention: if the first
# dimension of `dora_scale` is that of the weight, norms are of the rows of the weight alone, or
# (`of_sum`, as in PEFT's lora/dora.py) of the sum; otherwise of the columns of the sum. The
# strength blends the weight and the result.
def decompose(
    weight: Tensor,
    delta: Tensor,
    dora_scale: Tensor,
    strength: float,
    *,
    of_sum: bool = False,
) -> Tensor:
    """Return `weight` with the rows or columns of `weight + delta` scaled; both are overwritten."""
    shape = tuple(weight.shape)
    by_output = dora_scale.shape[0] == shape[0]
    merged = delta.add_(weight)
    kept = 0 if by_output else 1
    others = [axis for axis in range(len(shape)) if axis != kept]
    norms = torch.linalg.vector_norm(
        weight if by_output and not of_sum else merged, dim=others, keepdim=True
    )
    # An output of zeros has no direction.
    norms = norms + torch.finfo(weight.dtype).eps
    sizes = [-1 if axis == _dora_axis(dora_scale, shape) else 1 for axis in range(len(shape))]
    magnitudes = dora_scale.to(weight.device, weight.dtype).reshape(sizes)
    return weight.lerp_(merged.mul_(magnitudes / norms), strength)


def misfit_of_dora(dora_scale: Tensor | None, shape: tuple[int, ...]) -> str | None:
    """Return why magnitudes are neither `[out, 1, ...]` nor `[1, in, ...]`; None: they fit."""
    if dora_scale is None or _dora_axis(dora_scale, shape) is not None:
        return None
    return f"dora_scale is {spell(dora_scale.shape)}; the weight is {spell(shape)}"


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return `shape` as outputs and the product of all other dimensions."""
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)


def spell(shape: Sequence[int]) -> str:
    """Return `shape` as text, such as 5120x1536."""
    return "x".join(map(str, shape)) or "a scalar"


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _unequal(name: str, tensor: Tensor, shape: tuple[int, ...]) -> str | None:
    if tuple(tensor.shape) == shape:
        return None
    return f"{name} is {spell(tensor.shape)}; the weight is {spell(shape)}"


def _dora_axis(dora_scale: Tensor, shape: tuple[int, ...]) -> int | None:
    """Return the axis of the weight that the magnitudes belong to."""
    if len(shape) < 2:
        return None
    if dora_scale.numel() == shape[0] == dora_scale.shape[0]:
        return 0
    inputs = dora_scale.shape[:2][-1]
    return 1 if dora_scale.numel() == shape[1] == inputs else None
