"""Recognise SiLU-gated MLPs and their wiring by running their own code.

`down(silu(gate(x)) * up(x))` (Shazeer, "GLU Variants Improve Transformer", 2020) is written in many
ways, which names and shapes do not distinguish. So the module's own forward is run on tensors
without a shape, device or value to branch on, which only support `silu`, products, halves and
`nan_to_num`. The operations are then the same for every input, and the result identifies them.
"""

import functools
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_logger = logging.getLogger(__name__)

# Operations that a forward may use on the tensors.
_ALLOWED = frozenset(
    {
        F.silu,
        Tensor.chunk,
        Tensor.dtype.__get__,
        Tensor.mul,
        Tensor.mul_,
        Tensor.nan_to_num,
        torch.chunk,
        torch.mul,
        torch.nan_to_num,
    }
)

# Each dtype with a different number of dimensions, so that a dimension counted from the front is
# detected.
_ROWS = {
    torch.float64: (3,),
    torch.float32: (1, 3),
    torch.bfloat16: (2, 1, 2),
    torch.float16: (2, 2),
}

# Enough for every pair of the special values.
_CHANNELS = 1024


@dataclass(frozen=True)
class Wiring:
    """How a module is a gated MLP: `down(silu(parts[gate]) * parts[1 - gate])`."""

    # Children that take the input: two, or one for halves of its result; none: halves of the input.
    projections: tuple[str, ...]
    gate: int  # the part that passes SiLU: 0 or 1
    down: str | None  # the child that takes the product; None: there is none
    saturates: frozenset[torch.dtype] = frozenset()  # where `saturated` is used


# The weights are not accessed: they may be offloaded, quantised or on another device.
def recognise(module: nn.Module, cls: type[nn.Module]) -> Wiring | None:
    """Return how `module`, with the forward of `cls`, is a gated MLP; None: not proved."""
    try:
        if not _may_be(module, cls):
            return None
        first, *others = (_probe(module, cls, dtype, rows) for dtype, rows in _ROWS.items())
    except Exception as error:  # the code of another pack with unexpected inputs
        _logger.debug("%s is not a gated MLP: %s", cls.__name__, error)
        return None
    for other in others:
        if replace(other, saturates=first.saturates) != first:
            return None
        first = replace(first, saturates=first.saturates | other.saturates)
    return first


def saturated(product: Tensor) -> Tensor:
    """Return `product` `[..., C]` with infinities clamped to its dtype and NaN set to zero."""
    limit = torch.finfo(product.dtype).max
    return torch.nan_to_num(product, nan=0.0, posinf=limit, neginf=-limit)


def _may_be(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Return whether a module has only linear layers or a SiLU, and a forward with one argument."""
    children = dict(module.named_children())
    linears = _linears(module)
    return (
        len(children) > 0
        and len(linears) <= 3
        and all(name in linears or type(child) is nn.SiLU for name, child in children.items())
        and next(module.parameters(recurse=False), None) is None
        and next(module.buffers(recurse=False), None) is None
        and "forward" not in vars(module)  # an instance attribute, which hides the class's
        and len(inspect.signature(cls.forward).parameters) == 2
    )


def _linears(module: nn.Module) -> list[str]:
    """Return the names of the children that are linear layers of any class."""
    return [
        name
        for name, child in module.named_children()
        if hasattr(child, "in_features") and hasattr(child, "out_features")
    ]


def _probe(
    module: nn.Module, cls: type[nn.Module], dtype: torch.dtype, rows: tuple[int, ...]
) -> Wiring:
    """Run the forward on values of one dtype; an error means that it is not a gated MLP."""
    x = _numbers(dtype, rows, seed=0)
    answers = {
        name: _numbers(dtype, rows, seed) for seed, name in enumerate(_linears(module), start=1)
    }
    linears = {name: _Linear(answer) for name, answer in answers.items()}
    shown = _shown(x)
    result = cls.forward(_stand_in(module, cls, linears), shown)

    projections = tuple(name for name, linear in linears.items() if linear.took is shown)
    rest = [name for name in linears if name not in projections]
    if len(rest) > 1:
        raise ValueError(f"{' and '.join(rest)} do not take the input")
    down = rest[0] if rest else None
    if down is not None and result is not linears[down].gave:
        raise ValueError(f"its result is not that of {down}")
    product = result if down is None else linears[down].took
    parts = [answers[name] for name in projections] or [x]
    parts = parts[0].chunk(2, -1) if len(parts) == 1 else parts
    gate, saturates = _formula(parts, product.as_subclass(Tensor))
    return Wiring(projections, gate, down, saturates)


def _formula(parts: Sequence[Tensor], product: Tensor) -> tuple[int, frozenset[torch.dtype]]:
    """Return which part passes SiLU, and the dtype if the product is saturated."""
    first, second = parts
    for gate, plain in enumerate((F.silu(first) * second, first * F.silu(second))):
        if _same(product, plain):
            return gate, frozenset()
        if _same(product, saturated(plain)):
            return gate, frozenset({plain.dtype})
    raise ValueError("its product has another formula")


def _same(result: Tensor, expected: Tensor) -> bool:
    """Return whether two results differ by a few roundings: strided and dense loops can differ."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    info = torch.finfo(expected.dtype)
    return torch.allclose(
        result, expected, rtol=4 * info.eps, atol=4 * info.eps * info.tiny, equal_nan=True
    )


def _stand_in(
    module: nn.Module, cls: type[nn.Module], linears: Mapping[str, "_Linear"]
) -> nn.Module:
    """Return an object with the methods and settings of the module, and other linear layers."""
    stand_in = object.__new__(cls)
    vars(stand_in).update(vars(module), _modules={**module._modules, **linears})
    del vars(stand_in)["training"]  # a forward that reads it has two branches
    return stand_in


@functools.cache
def _numbers(dtype: torch.dtype, rows: tuple[int, ...], seed: int) -> Tensor:
    """Return `[*rows, C]`: random values with values that round, overflow or are NaN."""
    most = torch.finfo(dtype).max
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 100.0, -100.0, most, -most, torch.inf, -torch.inf, torch.nan],
        dtype=torch.float64,
    )
    random = torch.Generator().manual_seed(seed)
    shape = (*rows, _CHANNELS)
    picked = special[torch.randint(len(special), shape, generator=random)]
    plain = 2 * torch.randn(shape, generator=random, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=random) < 0.5, picked, plain).to(dtype)


def _shown(numbers: Tensor) -> "_Opaque":
    return numbers.clone().as_subclass(_Opaque)


class _Opaque(Tensor):
    """A tensor that only supports halving, products, SiLU and its dtype."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # noqa: ANN401, whatever PyTorch can be asked for
        types: tuple[type, ...],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func not in _ALLOWED:
            raise ValueError(f"it calls {getattr(func, '__name__', func)}")
        return super().__torch_function__(func, types, args, kwargs or {})


class _Linear:
    """A replacement of a linear layer that records its input and returns a given output."""

    def __init__(self, answer: Tensor) -> None:
        self.took: Tensor | None = None
        self.gave = _shown(answer)

    def __call__(self, x: Tensor) -> Tensor:
        if self.took is not None:
            raise ValueError("it calls a linear layer twice")
        self.took = x
        return self.gave
