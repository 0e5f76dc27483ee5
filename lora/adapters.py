"""What the parts of one module in a LoRA file do to a weight.

Plain pairs are joined in a bank. Everything else is a function of the weight with its own tensors:
differences and PEFT's DoRA from here, LoHa, LoKr, OFT and the like from ComfyUI (`OtherKinds`).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class WeightFunction:
    """A change of a weight, computed in float32 and rounded once; the weight is never written.

    Attributes:
        tensors: The tensors of the change.
        function: Called with a copy of the weight that it may overwrite, `[out, in, ...]` in
            float32 or float64, `tensors` on its device, and the strength; returns the new weight.
        adds: It adds the same to any weight, so what it makes of zeros can also be added to the
            output of a layer.
    """

    tensors: tuple[Tensor, ...]
    function: Callable[[Tensor, tuple[Tensor, ...], float], Tensor]
    adds: bool = False

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """Return the changed weight in new memory, with the dtype of `weight` `[out, in, ...]`."""
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        working = weight.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        return self.function(working, self.on(weight.device), strength).to(weight.dtype)

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensors `[...]` on `device`; copies from pinned memory do not wait."""
        waits = device.type != "cuda"
        return tuple(tensor.to(device, non_blocking=not waits) for tensor in self.tensors)

    def with_tensors(self, tensors: Sequence[Tensor]) -> "WeightFunction":
        """Return the same change with other `tensors` `[...]`, in the order of its own."""
        return replace(self, tensors=tuple(tensors))


@dataclass(frozen=True, eq=False)
class Pair(WeightFunction):
    """LoRA: `delta = scale * up @ down` (Hu et al., arXiv 2106.09685, section 4.1)."""

    scale: float = 1.0

    @property
    def down(self) -> Tensor:
        """`[rank, in]`, with the kernel of a convolution in `in`."""
        return self.tensors[0]

    @property
    def up(self) -> Tensor:
        """`[out, rank]`."""
        return self.tensors[1]


# Makes functions of all kinds that are not made here, from parts by their canonical names and the
# shape of the weight. Raises a ValueError with the reason if there is none.
OtherKinds = Callable[[Mapping[str, Tensor], tuple[int, ...]], WeightFunction]


def misfit(shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]) -> str | None:
    """Return why a pair or whole weight does not fit `shape`; None: it fits, or is another kind."""
    whole = shapes.get("diff", shapes.get("set_weight"))
    if whole is not None:
        same = whole == shape
        return None if same else f"a difference of {spell(whole)} for a parameter of {spell(shape)}"
    if not {"up", "down"} <= shapes.keys() or {"mid", "reshape_weight"} & shapes.keys():
        return None
    up, down = shapes["up"], shapes["down"]
    if not up or not down:
        return f"a pair of {spell(up)} and {spell(down)}"
    size = up[0], math.prod(down[1:])
    if len(shape) < 2 or size != as_matrix(shape):
        return f"a pair for {spell(size)} and a parameter of {spell(shape)}"
    if math.prod(shapes.get("magnitude", shape[:1])) != shape[0]:
        return f"magnitudes of {spell(shapes['magnitude'])} for a parameter of {spell(shape)}"
    return None


def make_function(
    parts: Mapping[str, Tensor], shape: tuple[int, ...], others: OtherKinds | None = None
) -> WeightFunction:
    """Build what the parts of one module do to its weight.

    Args:
        parts: Tensors by canonical name, with finite values, for which there is no `misfit`.
        shape: `[out, in, ...]` of the weight.
        others: Makes all kinds but pairs, whole weights and PEFT's DoRA.

    Returns:
        The function, for a plain pair a `Pair`.

    Raises:
        ValueError: No kind has these parts for this weight.
    """
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


def check_values(name: str, tensor: Tensor, where: str) -> None:
    """Refuse a part `[...]` without values, of integers, or with numbers that are not finite."""
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
