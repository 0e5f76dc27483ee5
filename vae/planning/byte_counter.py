"""The bytes of a run on `meta`: those that are allocated, and those that are read and written."""

import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...kernels import SIGNATURES, new_video
from ..layers.temporal_cache import Workspace

_IN_PLACE = {"aten::add_", "aten::sub_", "aten::mul_"}
_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::detach"}
_ALLOCATES = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}


def _summed(x: Tensor, dims: Sequence[int] = (), keeps: bool = False, **_: object) -> list[int]:
    gone = {dim % x.ndim for dim in dims} or set(range(x.ndim))
    return [1 if at in gone else side for at, side in enumerate(x.shape) if keeps or at not in gone]


def _joined(parts: Sequence[Tensor], dim: int = 0) -> list[int]:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return shape


def _broadcast(*shapes: Sequence[int]) -> list[int]:
    sides = itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    return [max(side) if 0 not in side else 0 for side in sides][::-1]


def _alike(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    **_: object,
) -> Tensor:
    """Return dense memory in the order of `x`, or in a given one."""
    kind: dict[str, Any] = {"dtype": dtype or x.dtype, "device": x.device}
    if memory_format not in (None, torch.preserve_format):
        return torch.empty(x.shape, memory_format=memory_format, **kind)
    strides, step = [1] * x.ndim, 1
    for dim in sorted(range(x.ndim), key=lambda dim: (x.stride(dim), x.shape[dim], -dim)):
        strides[dim], step = step, step * x.shape[dim]
    return torch.empty_strided(x.shape, strides, **kind)


# Shapes of the results of arithmetic. PyTorch computes it in Python on `meta`, and imports its
# compiler for that.
_SHAPES: dict[str, Callable[..., Sequence[int]]] = {
    "aten::mm": lambda x, y: (x.shape[0], y.shape[1]),
    "aten::addmm": lambda _, x, y: (x.shape[0], y.shape[1]),
    "aten::bmm": lambda x, y: (*x.shape[:2], y.shape[2]),
    "aten::cat": _joined,
    "aten::sum": _summed,
    "aten::flip": lambda x, _: x.shape,
    "aten::repeat": lambda x, times: [
        side * each
        for side, each in zip((*(1,) * (len(times) - x.ndim), *x.shape), times, strict=True)
    ],
    "aten::im2col": lambda x, taps, *_: (
        x.shape[0],
        x.shape[1] * math.prod(taps),
        x.shape[2] * x.shape[3],
    ),
    **dict.fromkeys(
        ("aten::add", "aten::sub", "aten::rsub", "aten::mul"),
        lambda x, y, **_: _broadcast(x.shape, getattr(y, "shape", ())),
    ),
}


class ByteCounter(TorchDispatchMode):
    """Counts the bytes of live storages, and those that are read and written.

    The arithmetic of PyTorch on `meta` is replaced by memory for its results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.moved = self.passes = self.head = 0
        self.adds = False
        self._known: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch's wrapper for that takes longer than most ops

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401, an op
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401, its result
        name, given = func._schema.name, kwargs or {}
        if name in _IN_PLACE:
            result = args[0]
        elif name == "aten::empty_like":
            result = _alike(*args, **given)
        elif name in _SHAPES and "out" not in given:
            like: Tensor = args[0] if isinstance(args[0], Tensor) else args[0][0]
            result = like.new_empty(tuple(_SHAPES[name](*args, **given)))
        else:
            result = func(*args, **given)
        if func.is_view or name in _VIEWS or not isinstance(result, Tensor):
            return result
        storage = result.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, storage._cdata)
        if name not in _ALLOCATES:
            self._read(*args, result)
        return result

    def op(self, _: object, name: str, args: Sequence[Any], made: Tensor) -> None:
        """Count an op of `kernels`, whatever would run it: what it is given, and its result."""
        given = dict(zip(SIGNATURES[name], args, strict=True)) | {"out": None}
        # A norm also replaces the tail that it reads.
        again = given["tail"] if name.endswith("norm_silu") else None
        self._read(*given.values(), made, again)
        if name == "attention":
            self.head = args[0].shape[-1]
        self.adds |= given.get("residual") is not None

    def leave_out(self, make: Callable[[], Tensor]) -> Tensor:
        """Return what `make` returns, whose storage does not count."""
        peak, tensor = self.peak, make()
        key = tensor.untyped_storage()._cdata
        self.live -= self._known[key]
        self._known[key], self.peak = 0, peak
        return tensor

    def _read(self, *tensors: object) -> None:
        self.passes += 1
        for each in tensors:
            if isinstance(each, Tensor) and not isinstance(each, nn.Parameter):
                self.moved += min(each.nbytes, each.untyped_storage().nbytes())

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


class UncountedScratch(Workspace):
    """Scratch memory that a counter leaves out, with its largest size."""

    def __init__(self, counter: ByteCounter) -> None:
        super().__init__()
        self._counter, self.largest = counter, 0

    def scratch(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Return memory for the input of a convolution."""
        memory = self._counter.leave_out(lambda: new_video(like, tuple(shape)))
        self.largest = max(self.largest, memory.nbytes)
        return memory
