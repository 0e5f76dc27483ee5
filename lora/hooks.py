"""Hooks on the modules of a model, which apply LoRAs during a call.

They leave a module's forward untouched, are registered once and do nothing between calls. No weight
is written: the change is made to a copy. A module that applies functions to its weights after
casting (ComfyUI's have `weight_function` and `bias_function`) has ours during the whole call of the
model: so a weight that is read without a call of the module also gets the LoRA, as ComfyUI reads
Wan's int8 feed forwards, and a module that is neither called nor read costs nothing. In the forward
of a module that bypass serves, the functions are away, so quantised products stay quantised. Any
other module gets another parameter for the time of its forward.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .deltas import ApplyMode, JoinedPairs, ScaledFunction, break_even
from .precision import is_plain, is_weak, rms_of
from .substitution import Changes, substitution_of


@dataclass
class Counts:
    """Number of deltas that were applied, by method; `timed` measures the work on a device."""

    stream: int = 0
    bypass: int = 0
    formula: int = 0
    unserved: set[str] = field(default_factory=set)  # modules whose weights could not be reached
    fetched_bytes: int = 0  # of pairs, which are on the host
    timed: Callable[[str, torch.device], AbstractContextManager[None]] | None = None

    def add(self, delta: JoinedPairs | ScaledFunction, way: str) -> None:
        """Count `delta`, which was applied by `way`."""
        if not torch.compiler.is_compiling():  # each number would be compiled separately
            kind = "formula" if isinstance(delta, ScaledFunction) else way
            setattr(self, kind, getattr(self, kind) + 1)

    def clear(self) -> None:
        """Reset the counts."""
        self.stream = self.bypass = self.formula = self.fetched_bytes = 0


Deltas = Sequence[JoinedPairs | ScaledFunction]


@dataclass
class LayerWork:
    """The work at a module in a call."""

    counts: Counts
    mode: ApplyMode
    deltas: Deltas | Callable[[], Deltas] = ()  # a function: returned in the call
    needs_weight: bool = False  # there are others than pairs among them
    bias: Sequence[ScaledFunction] = ()
    rms: Callable[[], float] | None = None  # of the smallest delta of pairs; None: any survives
    _is_weak: bool | None = None

    def now(self) -> Deltas:
        """Return the deltas of the weight."""
        return self.deltas() if callable(self.deltas) else self.deltas

    def is_weak(self, size: Callable[[], float | None], dtype: torch.dtype) -> bool:
        """Return whether rounding to `dtype` would lose a delta of a weight of `size`."""
        if self._is_weak is None:
            rms = 0.0 if self.rms is None else self.rms()
            self._is_weak = rms > 0 and is_weak(rms, size(), dtype)
        return self._is_weak


class LayerHook:
    """The hooks of one module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.work: LayerWork | None = None
        self._outer: list[LayerWork | None] = []
        self._weight_changed = self._bias_changed = False
        self._substitution = substitution_of(module)
        # The same objects in each call, because compiled code refers to them.
        self._changes: dict[tuple[bool, bool], Changes] = {
            (True, True): {"weight": self._weight, "bias": self._bias},
            (True, False): {"weight": self._weight},
            (False, True): {"bias": self._bias},
        }
        self._size: float | None = None  # of the weight
        weight = _parameter(module, "weight")
        self._linear = weight is not None and _is_linear(module)
        module.register_forward_pre_hook(self._before)
        # Hooks of other packs get the output with the LoRAs.
        module.register_forward_hook(self._after, prepend=True)

    def begin(self, work: LayerWork) -> None:
        """Prepare for a call of the model with `work`, which can be within another call."""
        self._outer.append(self.work)
        self.work = work
        self._start(work)

    def end(self) -> None:
        """Clean up after the call, also after an error."""
        self.work = self._outer.pop()
        self._start(self.work)

    def _start(self, work: LayerWork | None) -> None:
        self._substitution.detach()
        if work is not None and self._substitution.is_lazy:
            self._substitution.attach(self._changes[bool(work.deltas), bool(work.bias)])

    def _before(self, module: nn.Module, args: tuple) -> None:
        work = self.work
        if work is None:
            return
        self._weight_changed = self._bias_changed = False
        x = args[0] if args else None
        by_weight = not self._linear or not isinstance(x, Tensor) or self._streams(work, x)
        is_lazy = self._substitution.is_lazy
        if by_weight:
            if not is_lazy:
                self._substitution.attach(self._changes[bool(work.deltas), bool(work.bias)])
        elif is_lazy:
            self._substitution.detach()
            if work.bias and not self._has_own_product:
                self._substitution.attach(self._changes[False, True])

    def _after(self, module: nn.Module, args: tuple, y: Tensor) -> Tensor | None:
        work = self.work
        if work is None:
            return None
        # They did not, if the module reads its weight in its own way, as some of other packs do.
        weight_changed = self._weight_changed or not work.deltas
        bias_changed = self._bias_changed or not work.bias
        self._substitution.detach()
        if self._linear and isinstance(y, Tensor) and args:
            if not weight_changed:
                y = self._bypassed(work, y, args[0])
            for change in () if bias_changed else work.bias:
                y = self._added(work, y, change.into_output(y))
        elif not (weight_changed and bias_changed):
            work.counts.unserved.add(self.name)
        self._start(work)
        return y

    def _bypassed(self, work: LayerWork, y: Tensor, x: Tensor) -> Tensor:
        with self._timed(work, "bypass", y):
            for delta in work.now():
                y = self._added(work, y, added := delta.bypass(y, x))
                if added is not None:
                    work.counts.add(delta, "bypass")
        return y

    def _added(self, work: LayerWork, y: Tensor, added: Tensor | None) -> Tensor:
        """Return an output with a delta, or if there is none (None) without it."""
        if added is None:
            work.counts.unserved.add(self.name)
            return y
        return added

    def _streams(self, work: LayerWork, x: Tensor) -> bool:
        """Return whether a call uses a changed weight."""
        if not work.deltas:
            return False
        if work.needs_weight or work.mode == "stream":
            return True
        if torch.compiler.is_compiling() or work.mode == "bypass" or self._has_own_product:
            return False
        weight = _parameter(self.module, "weight")
        if weight is None:
            return False
        out, inner = weight.shape[0], x.shape[-1]
        # A weight that is cast is copied anyway.
        most = break_even(inner, out) / (1 if weight.dtype == x.dtype else 2)
        is_faster = x.numel() // max(1, inner) > most
        return is_faster and not work.is_weak(self._weight_size, x.dtype)

    def _weight_size(self) -> float | None:
        if self._size is None and (weight := _parameter(self.module, "weight")) is not None:
            self._size = rms_of(weight)
        return self._size

    @property
    def _has_own_product(self) -> bool:
        """Whether the module multiplies without casting its weight to a plain tensor first."""
        weight = _parameter(self.module, "weight")
        if weight is None or getattr(self.module, "_full_precision_mm", False):
            return False
        if not is_plain(weight):
            return True
        fp8 = "fp8_ops" in type(self.module).__qualname__ and weight.element_size() == 1
        return fp8 or not weight.is_floating_point()

    def _weight(self, weight: Tensor) -> Tensor:
        """Return `weight` `[out, in, ...]`, as the module computes with it, with the deltas."""
        work = self.work
        if work is None:
            return weight
        self._weight_changed = True
        owned = False  # memory of the module, or of another pack's function
        with self._timed(work, "formula" if work.needs_weight else "stream", weight):
            for delta in work.now():
                work.counts.add(delta, "stream")
                weight, owned = delta.into_weight(weight, owned=owned), True
        return weight

    def _bias(self, bias: Tensor) -> Tensor:
        """Return `bias` `[out]` with its changes."""
        if self.work is None:
            return bias
        self._bias_changed = True
        for change in self.work.bias:
            bias = change.into_weight(bias)
        return bias

    def _timed(self, work: LayerWork, kind: str, like: Tensor) -> AbstractContextManager[None]:
        timed = work.counts.timed
        if timed is None or torch.compiler.is_compiling():
            return nullcontext()
        return timed(kind, like.device)


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> Callable[[], None]:
    """Replace a parameter of a module, and return a function that restores it."""
    own = module._parameters[name]
    module._parameters[name] = changed = nn.Parameter(value, requires_grad=False)
    # For a call within a call.
    changed.unchanged = getattr(own, "unchanged", own)  # type: ignore[attr-defined]
    return lambda: module._parameters.__setitem__(name, own)


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies the last axis of its input."""
    if isinstance(module, nn.Linear):
        return True
    wanted = ("in_features", "out_features")
    weight = _parameter(module, "weight")
    return all(hasattr(module, name) for name in wanted) and (
        weight is None or weight.ndim == 2 or math.prod(weight.shape[2:]) == 1
    )
