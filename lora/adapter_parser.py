"""From the tensors of one module in a LoRA file to an adapter: which kind, and is it whole.

What a part is called here is canonical; the dialects of files are translated before. Conventions
(which numbers a scale is made of, what DoRA's norms are over) are those of ComfyUI, so that a file
gives the pictures that its users know; the mathematics is told where each kind is.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .adapter import Adapter, Additive, as_matrix, spell
from .low_rank import GLoRA, Hadamard, Kronecker, Pair, product_shape
from .orthogonal import BOFT, OFT

__all__ = [
    "BOFT", "OFT", "PARTS", "Adapter", "Diff", "GLoRA", "Hadamard", "Kronecker", "Pair",
    "Replacement", "check_fits", "make_adapter",
]  # fmt: skip

_LORA = ("up", "down", "mid", "reshape_weight", "magnitude")
_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")
_LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
_GLORA = ("a1", "a2", "b1", "b2")
_OFT = ("oft_blocks", "rescale")
_DIFFS = ("diff", "w_norm")

PARTS = frozenset({
    *_LORA, *_LOHA, *_LOKR, *_GLORA, *_OFT, *_DIFFS, "set_weight", "alpha", "dora_scale",
    # For other parameters of the module than its weight.
    "b_norm", "diff_b", "diff_m",
})  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Diff(Additive):
    """A difference of weights in full, also of norms and biases.

    Attributes:
        difference: Of the weight's shape.
    """

    kind: ClassVar[str] = "diff"

    difference: Tensor

    @property
    def delta_shape(self) -> tuple[int, ...]:
        """See `Additive.delta_shape`."""
        return tuple(self.difference.shape)

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """See `Adapter.misfit`."""
        return _unequal("delta", self.difference, shape)

    def accumulate(self, out: Tensor, factor: float) -> None:
        """See `Additive.accumulate`."""
        out.add_(self.difference.to(out.device, out.dtype), alpha=factor)


@dataclass(frozen=True, eq=False, kw_only=True)
class Replacement(Adapter):
    """Another weight in place of the model's, whatever the strength, unless it is 0.

    Attributes:
        value: Of the weight's shape.
    """

    kind: ClassVar[str] = "set"

    value: Tensor

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """See `Adapter.misfit`."""
        return _unequal("set_weight", self.value, shape)

    def change(self, working: Tensor, strength: float) -> Tensor:
        """See `Adapter.change`."""
        del strength
        return working.copy_(self.value)


def make_adapter(parts: Mapping[str, Tensor], where: str) -> Adapter:
    """The adapter that the parts of one module are, for the weight of the module.

    Args:
        parts: By canonical name, any floating dtype. Differences of other parameters (`diff_b`,
            `b_norm`, `diff_m`) are given as `{"diff": tensor}`.
        where: The module and file, for the errors.

    Raises:
        ValueError: A part is missing, unknown, empty, not of floating point, not finite, or does
            not fit the others.
    """
    unknown = sorted(set(parts) - PARTS)
    if unknown:
        raise ValueError(f"{where}: unknown part {unknown[0]!r}; expected parts of a LoRA file")
    for name, tensor in parts.items():
        _check_values(name, tensor, where)
    named = set(parts) - {"alpha", "dora_scale"}
    for family, make in _FAMILIES:
        if named and named <= set(family):
            return make(_Module(parts, where))
    found = ", ".join(sorted(parts)) or "nothing"
    raise ValueError(f"{where}: {found} together; expected the parts of one kind of adapter")


def check_fits(adapter: Adapter, shape: Sequence[int]) -> str | None:
    """Why an adapter does not fit a weight of this shape, in a few words; None: it fits.

    A kernel may be flattened in the one or the other, and `reshape_weight` may make the weight
    grow into what fits.
    """
    return adapter.misfit(tuple(shape))


@dataclass(frozen=True)
class _Module:
    """The parts of one module, and errors that say where."""

    parts: Mapping[str, Tensor]
    where: str

    def get(self, name: str) -> Tensor | None:
        return self.parts.get(name)

    def has(self, *names: str) -> bool:
        return any(name in self.parts for name in names)

    def need(self, *names: str) -> tuple[Tensor, ...]:
        missing = [name for name in names if name not in self.parts]
        if missing:
            found = ", ".join(sorted(self.parts))
            raise self.error(f"{found} without {', '.join(missing)}", "all of them")
        return tuple(self.parts[name] for name in names)

    def matrices(self, *names: str) -> tuple[Tensor, ...]:
        found = self.need(*names)
        for name, tensor in zip(names, found, strict=True):
            if tensor.ndim < 2:
                raise self.error(f"{name} has the shape {list(tensor.shape)}", "two dimensions")
        return found

    def same_rank(self, *ends: tuple[str, int]) -> None:
        """The dimension that two parts meet in; an end is a part and the number of that."""
        ranks = [(name, self.parts[name].shape[axis]) for name, axis in ends]
        if len({rank for _, rank in ranks}) > 1:
            told = ", ".join(f"{name} has rank {rank}" for name, rank in ranks)
            raise self.error(told, "the same rank")

    @property
    def alpha(self) -> float | None:
        tensor = self.get("alpha")
        return None if tensor is None else float(tensor.item())

    def scale(self, rank: int) -> float:
        return 1.0 if self.alpha is None else self.alpha / rank

    @property
    def dora_scale(self) -> Tensor | None:
        tensor = self.get("dora_scale")
        if tensor is not None and tensor.ndim == 0:
            raise self.error("dora_scale is a lone number", "one for each output or input")
        return tensor

    def error(self, found: str, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {found}; expected {expected}")


def _lora(module: _Module) -> Adapter:
    up, down = module.matrices("up", "down")
    mid = module.get("mid")
    if mid is None:
        up = up.flatten(1)
        if up.shape[1] != down.shape[0]:
            found = f"up has rank {up.shape[1]}, down has rank {down.shape[0]}"
            raise module.error(found, "the same rank")
    else:
        module.matrices("mid")
        module.same_rank(("up", 1), ("mid", 0))
        module.same_rank(("down", 0), ("mid", 1))
        up = up.flatten(1)
    reshape = module.get("reshape_weight")
    magnitude = module.get("magnitude")
    return Pair(
        down=down,
        up=up,
        mid=mid,
        scale=module.scale(down.shape[0]),
        dora_scale=module.dora_scale if magnitude is None else magnitude.reshape(-1, 1),
        norms_of_sum=magnitude is not None,
        reshape=None if reshape is None else tuple(int(size) for size in reshape.flatten()),
    )


def _loha(module: _Module) -> Adapter:
    tucker = module.has("hada_t1", "hada_t2")
    w1 = _factors(module, "hada_w1", "hada_t1" if tucker else None)
    w2 = _factors(module, "hada_w2", "hada_t2" if tucker else None)
    first, second = product_shape(w1), product_shape(w2)
    if as_matrix(first) != as_matrix(second):
        found = f"hada_w1 is {spell(first)}, hada_w2 is {spell(second)}"
        raise module.error(found, "the same shape")
    scale = module.scale(w1[1].shape[0])
    return Hadamard(w1=w1, w2=w2, scale=scale, dora_scale=module.dora_scale)


def _lokr(module: _Module) -> Adapter:
    tucker = "lokr_t2" if module.has("lokr_t2") else None
    w1 = _factors(module, "lokr_w1", None)
    w2 = _factors(module, "lokr_w2", tucker)
    if len(product_shape(w1)) != 2:
        raise module.error(f"lokr_w1 is {spell(product_shape(w1))}", "two dimensions")
    decomposed = [factors for factors in (w2, w1) if len(factors) > 1]
    # The alpha of a file with both factors whole says nothing.
    scale = module.scale(decomposed[0][1].shape[0]) if decomposed else 1.0
    return Kronecker(w1=w1, w2=w2, scale=scale, dora_scale=module.dora_scale)


def _glora(module: _Module) -> Adapter:
    a1, a2, b1, b2 = module.matrices(*_GLORA)
    adapter = GLoRA(
        a1=a1, a2=a2, b1=b1, b2=b2, alpha=module.alpha, dora_scale=module.dora_scale
    )  # fmt: skip
    if not any(adapter.layouts):
        found = ", ".join(f"{name} is {spell(module.parts[name].shape)}" for name in _GLORA)
        raise module.error(found, "one rank in all")
    return adapter


def _oft(module: _Module) -> Adapter:
    (blocks,) = module.need("oft_blocks")
    if blocks.ndim not in (3, 4) or blocks.shape[-1] != blocks.shape[-2]:
        found = f"oft_blocks is {spell(blocks.shape)}"
        raise module.error(found, "square blocks in 3 or 4 dimensions")
    if blocks.ndim == 4 and blocks.shape[-1] % 2:
        raise module.error(f"oft_blocks is {spell(blocks.shape)}", "an even size of the blocks")
    return (OFT if blocks.ndim == 3 else BOFT)(
        blocks=blocks,
        rescale=module.get("rescale"),
        constraint=module.alpha or 0.0,
        dora_scale=module.dora_scale,
    )


def _whole(module: _Module) -> Adapter:
    """Differences and replacements; an alpha beside them says nothing."""
    if module.has("dora_scale"):
        raise module.error("dora_scale on a whole weight", "factors beside it")
    value = module.get("set_weight")
    if value is not None:
        return Replacement(value=value)
    names = [name for name in _DIFFS if module.has(name)]
    if len(names) > 1:
        raise module.error("diff and w_norm together", "one difference")
    return Diff(difference=module.parts[names[0]])


_FAMILIES: tuple[tuple[tuple[str, ...], Callable[[_Module], Adapter]], ...] = (
    (_LORA, _lora),
    (_LOHA, _loha),
    (_LOKR, _lokr),
    (_GLORA, _glora),
    (_OFT, _oft),
    (_DIFFS, _whole),
    (("set_weight",), _whole),
)


def _factors(module: _Module, name: str, core: str | None) -> tuple[Tensor, ...]:
    """One tensor, or the two or three that it is decomposed into."""
    a, b = f"{name}_a", f"{name}_b"
    if module.has(name):
        if module.has(a, b) or core:
            raise module.error(f"{name} both whole and decomposed", "the one or the other")
        return module.matrices(name)
    if core is None:
        factors = module.matrices(a, b)
        module.same_rank((a, 1), (b, 0))
        return factors
    factors = module.matrices(a, b, core)
    module.same_rank((a, 0), (core, 0))
    module.same_rank((b, 0), (core, 1))
    return factors


def _check_values(name: str, tensor: Tensor, where: str) -> None:
    if tensor.numel() == 0:
        raise ValueError(f"{where}: {name} is {list(tensor.shape)}; expected numbers")
    if name == "alpha":
        if tensor.numel() != 1 or not math.isfinite(tensor.item()):
            value = tensor.item() if tensor.numel() == 1 else list(tensor.shape)
            raise ValueError(f"{where}: alpha is {value}; expected one finite number")
        return
    if name == "reshape_weight":
        return
    if not tensor.is_floating_point():
        raise ValueError(f"{where}: {name} is {tensor.dtype}; expected floating point")
    values = tensor.float() if tensor.element_size() == 1 else tensor  # no arithmetic in float8
    for bound in torch.stack(torch.aminmax(values)).tolist():
        if not math.isfinite(bound):
            raise ValueError(f"{where}: {name} holds {bound}; expected finite numbers")


def _unequal(name: str, tensor: Tensor, shape: tuple[int, ...]) -> str | None:
    if tuple(tensor.shape) == shape:
        return None
    return f"{name} is {spell(tensor.shape)}; the weight is {spell(shape)}"
