"""The bytes that a run on `meta` allocates."""

import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_IN_PLACE = {"aten::add_", "aten::sub_", "aten::mul_"}
_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::detach"}

# Attention on a GPU in blocks: the head size above which blocks are used, the scores of a block,
# and the bytes of a score and its softmax (kernels/reference/attention.py).
_FUSED_HEAD = 256
_SCORES = 1 << 26
_SCORE_BYTES = 8


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
    """Counts the bytes of live storages of a run on `meta`: the `peak`, and the `largest` one.

    It plays a `device`. The arithmetic of PyTorch on `meta` is replaced by memory for its results.
    """

    def __init__(self, device: torch.device | None = None, *, casts: bool = False) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._on_cpu = device is not None and device.type == "cpu"
        self._copies = (1 + casts) * self._on_cpu  # of a weight that is not kept
        self._known: set[int] = set()

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
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += nbytes
            self.largest = max(self.largest, nbytes)
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, nbytes)
        return result

    def op(self, _: object, name: str, args: Sequence[Any], made: Tensor) -> None:
        """Count what an op of `kernels` needs next to its result while it runs on the device."""
        inside = 0
        if name == "conv3d" and not args[1].keeps:
            # oneDNN reorders the weight in each call, one frame of taps in PyTorch's order too.
            times = self._copies * (1 + (args[1].ndim == 4))
            inside = times * math.prod(args[1].shape) * made.element_size()
        elif name == "attention" and args[0].shape[-1] > _FUSED_HEAD and not self._on_cpu:
            batch, length, _ = args[0].shape
            inside = _SCORE_BYTES * min(batch * length**2, _SCORES)
        self.peak = max(self.peak, self.live + inside)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes
