"""Build an adapter from the tensors of one module in a LoRA file, after checks of kind and shape.

The names of parts here are canonical; the dialects of files are translated before. Conventions (the
terms of a scale, the norms of DoRA) are those of ComfyUI, so that a file has the effect that its
users know. The mathematics is described at each kind.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Adapter, Diff, Replacement, as_matrix, spell
from .low_rank import GLoRA, Hadamard, Kronecker, Pair, product_shape
from .orthogonal import BOFT, OFT

_LORA = ("up", "down", "mid", "reshape_weight", "magnitude")
_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")
_LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
_GLORA = ("a1", "a2", "b1", "b2")
_OFT = ("oft_blocks", "rescale")
_DIFFS = ("diff", "w_norm")

PARTS = frozenset({
    *_LORA, *_LOHA, *_LOKR, *_GLORA, *_OFT, *_DIFFS, "set_weight", "alpha", "dora_scale",
    # For parameters of the module other than its weight.
    "b_norm", "diff_b", "diff_m",
})  # fmt: skip


def make_adapter(parts: Mapping[str, Tensor], where: str) -> Adapter:
    """Build the adapter of one module from its parts by canonical name, for its weight."""
    unknown = sorted(set(parts) - PARTS)
    if unknown:
        raise ValueError(f"{where}: unknown part {unknown[0]!r}; expected parts of a LoRA file")
    for name, tensor in parts.items():
        _check_values(name, tensor, where)
    named = set(parts) - {"alpha", "dora_scale"}
    for family, make in _FAMILIES:
        if named and named <= set(family):
            return make(_Parts(parts, where))
    found = ", ".join(sorted(parts)) or "empty"
    raise ValueError(f"{where}: the parts are {found}; expected those of one kind of adapter")


@dataclass(frozen=True)
class _Parts:
    """The parts of one module, with errors that name its place."""

    tensors: Mapping[str, Tensor]
    where: str

    def need(self, *names: str) -> tuple[Tensor, ...]:
        missing = [name for name in names if name not in self.tensors]
        if missing:
            found = ", ".join(sorted(self.tensors))
            raise self.error(f"{found} without {', '.join(missing)}", "all of them")
        return tuple(self.tensors[name] for name in names)

    def matrices(self, *names: str) -> tuple[Tensor, ...]:
        found = self.need(*names)
        for name, tensor in zip(names, found, strict=True):
            if tensor.ndim < 2:
                raise self.error(f"{name} has the shape {list(tensor.shape)}", "two dimensions")
        return found

    def factors(self, name: str, core: str | None) -> tuple[Tensor, ...]:
        """Return one tensor, or the two or three tensors that it is decomposed into."""
        a, b = f"{name}_a", f"{name}_b"
        if name in self.tensors:
            if {a, b} & self.tensors.keys() or core:
                raise self.error(f"{name} both whole and decomposed", "one of the two")
            return self.matrices(name)
        factors = self.matrices(a, b, *([core] if core else []))
        shapes = [factor.shape for factor in factors]
        if core is None:
            self.same_rank({a: shapes[0][1], b: shapes[1][0]})
        else:
            self.same_rank({a: shapes[0][0], core: shapes[2][0]})
            self.same_rank({b: shapes[1][0], core: shapes[2][1]})
        return factors

    def same_rank(self, ranks: Mapping[str, int]) -> None:
        """Refuse parts that disagree in a common dimension."""
        if len(set(ranks.values())) > 1:
            found = ", ".join(f"{name} has rank {rank}" for name, rank in ranks.items())
            raise self.error(found, "the same rank")

    @property
    def alpha(self) -> float | None:
        tensor = self.tensors.get("alpha")
        return None if tensor is None else float(tensor.item())

    def scale(self, rank: int) -> float:
        return 1.0 if self.alpha is None else self.alpha / rank

    @property
    def dora_scale(self) -> Tensor | None:
        tensor = self.tensors.get("dora_scale")
        if tensor is not None and tensor.ndim == 0:
            raise self.error("dora_scale is a scalar", "one value per output or input")
        return tensor

    def error(self, found: str, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {found}; expected {expected}")


def _lora(parts: _Parts) -> Adapter:
    up, down = parts.matrices("up", "down")
    mid, reshape, magnitude = map(parts.tensors.get, ("mid", "reshape_weight", "magnitude"))
    if mid is None:
        parts.same_rank({"up": math.prod(up.shape[1:]), "down": down.shape[0]})
    else:
        parts.matrices("mid")
        parts.same_rank({"up": up.shape[1], "mid": mid.shape[0]})
        parts.same_rank({"down": down.shape[0], "mid": mid.shape[1]})
    return Pair(
        down=down,
        up=up.flatten(1),
        mid=mid,
        scale=parts.scale(down.shape[0]),
        dora_scale=parts.dora_scale if magnitude is None else magnitude.reshape(-1, 1),
        norms_of_sum=magnitude is not None,
        reshape=None if reshape is None else tuple(int(size) for size in reshape.flatten()),
    )


def _loha(parts: _Parts) -> Adapter:
    tucker = {"hada_t1", "hada_t2"} & parts.tensors.keys()
    w1 = parts.factors("hada_w1", "hada_t1" if tucker else None)
    w2 = parts.factors("hada_w2", "hada_t2" if tucker else None)
    first, second = product_shape(w1), product_shape(w2)
    if as_matrix(first) != as_matrix(second):
        found = f"hada_w1 is {spell(first)}, hada_w2 is {spell(second)}"
        raise parts.error(found, "the same shape")
    scale = parts.scale(w1[1].shape[0])
    return Hadamard(w1=w1, w2=w2, scale=scale, dora_scale=parts.dora_scale)


def _lokr(parts: _Parts) -> Adapter:
    w1 = parts.factors("lokr_w1", None)
    w2 = parts.factors("lokr_w2", "lokr_t2" if "lokr_t2" in parts.tensors else None)
    if len(product_shape(w1)) != 2:
        raise parts.error(f"lokr_w1 is {spell(product_shape(w1))}", "two dimensions")
    decomposed = [factors for factors in (w2, w1) if len(factors) > 1]
    # The alpha of a file without decomposed factors is ignored.
    scale = parts.scale(decomposed[0][1].shape[0]) if decomposed else 1.0
    return Kronecker(w1=w1, w2=w2, scale=scale, dora_scale=parts.dora_scale)


def _glora(parts: _Parts) -> Adapter:
    a1, a2, b1, b2 = parts.matrices(*_GLORA)
    adapter = GLoRA(
        a1=a1, a2=a2, b1=b1, b2=b2, alpha=parts.alpha, dora_scale=parts.dora_scale
    )  # fmt: skip
    if not any(adapter.layouts):
        found = ", ".join(f"{name} is {spell(parts.tensors[name].shape)}" for name in _GLORA)
        raise parts.error(found, "one common rank")
    return adapter


def _oft(parts: _Parts) -> Adapter:
    (blocks,) = parts.need("oft_blocks")
    if blocks.ndim not in (3, 4) or blocks.shape[-1] != blocks.shape[-2]:
        found = f"oft_blocks is {spell(blocks.shape)}"
        raise parts.error(found, "square blocks in 3 or 4 dimensions")
    if blocks.ndim == 4 and blocks.shape[-1] % 2:
        raise parts.error(f"oft_blocks is {spell(blocks.shape)}", "blocks of an even size")
    return (OFT if blocks.ndim == 3 else BOFT)(
        blocks=blocks,
        rescale=parts.tensors.get("rescale"),
        constraint=parts.alpha or 0.0,
        dora_scale=parts.dora_scale,
    )


def _whole(parts: _Parts) -> Adapter:
    """Build differences and replacements, whose alpha is ignored."""
    if "dora_scale" in parts.tensors:
        raise parts.error("dora_scale with a whole weight", "dora_scale with factors")
    if (value := parts.tensors.get("set_weight")) is not None:
        return Replacement(value=value)
    differences = [parts.tensors[name] for name in _DIFFS if name in parts.tensors]
    if len(differences) > 1:
        raise parts.error("diff and w_norm together", "one difference")
    return Diff(difference=differences[0])


_FAMILIES: tuple[tuple[tuple[str, ...], Callable[[_Parts], Adapter]], ...] = (
    (_LORA, _lora),
    (_LOHA, _loha),
    (_LOKR, _lokr),
    (_GLORA, _glora),
    (_OFT, _oft),
    (_DIFFS, _whole),
    (("set_weight",), _whole),
)


def _check_values(name: str, tensor: Tensor, where: str) -> None:
    if tensor.numel() == 0:
        raise ValueError(f"{where}: {name} has the shape {list(tensor.shape)}; expected values")
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
