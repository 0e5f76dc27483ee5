"""A module of a model, as the place where LoRAs are applied while a call goes through it.

Hooks stand beside the module, so that its forward is its own, or another pack's. They are
registered once and do nothing between calls, which `torch.compile` can tell from the attribute that
they look at. No weight is written: what is changed on the way is a copy. A module that applies
functions to its weights after it has cast them (ComfyUI's have `weight_function` and
`bias_function`) is given one for the time of its forward; any other gets another parameter for so
long.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .adapter_parser import Adapter
from .apply import Low, Mode, beside, break_even, dense_beside, into_weight
from .timer import Timer

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass
class Counts:
    """What was done in the calls so far.

    Attributes:
        stream: Pairs that were added to a weight.
        beside: Pairs that were applied beside a layer.
        formula: Adapters of other kinds.
        unserved: Names of modules whose weights could not be reached.
        timer: Of the work; None: it is not timed.
    """

    stream: int = 0
    beside: int = 0
    formula: int = 0
    unserved: set[str] = field(default_factory=set)
    timer: Timer | None = None

    def clear(self) -> None:
        """Begin anew."""
        self.stream = self.beside = self.formula = 0


class Formula(NamedTuple):
    """An adapter that is no plain pair.

    Attributes:
        adapter: Which.
        strength: Its strength.
        part: Axis, first index and length of the part of the weight that it is for; None: all.
    """

    adapter: Adapter
    strength: float
    part: tuple[int, int, int] | None = None


Steps = Sequence[Low | Formula]


@dataclass
class Work:
    """What is to be done at a site during a call.

    Attributes:
        steps: For the weight, in their order; or what gives them when the module is called.
        through_weight: There are formulas among them, which need the weight.
        bias: For the bias.
        mode: How pairs are to be applied.
        c: See `break_even`.
    """

    steps: Steps | Callable[[], Steps] = ()
    through_weight: bool = False
    bias: Sequence[Formula] = ()
    mode: Mode = "auto"
    c: float = 4.0

    def now(self) -> Steps:
        """The steps."""
        return self.steps() if callable(self.steps) else self.steps


class Site:
    """One module.

    Args:
        module: Which.
        name: Of it.
        counts: Where it is noted what was done.

    Attributes:
        work: Of the call that is going through the model; None: nothing is to be done.
        fired: The module's forward was called, since this was set to False.
        through_weight: Its forward is not called, so that all goes through its weight.
    """

    def __init__(self, module: nn.Module, name: str, counts: Counts) -> None:
        self.module, self.name, self.counts = module, name, counts
        self.work: Work | None = None
        self.fired = self.through_weight = False
        self._ignores_functions = False
        self._undo: list[Callable[[], None]] = []
        self._done = self._pushed = False
        weight = _parameter(module, "weight")
        self._linear = weight is not None and _is_linear(module)
        module.register_forward_pre_hook(self._before)
        # Hooks of others are given what the layer makes with its LoRA.
        module.register_forward_hook(self._after, prepend=True)

    @property
    def has_own_product(self) -> bool:
        """Whether the module multiplies without casting its weight to a plain tensor first."""
        weight = _parameter(self.module, "weight")
        if weight is None or getattr(self.module, "_full_precision_mm", False):
            return False
        if type(weight) not in (Tensor, nn.Parameter):
            return True
        fp8 = "fp8_ops" in type(self.module).__qualname__ and weight.element_size() == 1
        return fp8 or not weight.is_floating_point()

    def begin(self) -> None:
        """Before a call of the model."""
        self.fired = False
        if self.through_weight and self.work is not None:
            self._push(self.work)

    def end(self) -> None:
        """After the call, however it ended."""
        self._restore()
        self.work = None

    def _before(self, module: nn.Module, args: tuple) -> None:
        work = self.work
        if work is None or self.through_weight:
            return
        self.fired = True
        x = args[0] if args else None
        if not self._linear or not isinstance(x, Tensor) or self._streams(work, x):
            self._push(work)

    def _after(self, module: nn.Module, args: tuple, y: Tensor) -> Tensor | None:
        work = self.work
        if work is None or self.through_weight:
            return None
        pushed, done = self._pushed, self._done
        self._restore()
        if pushed and not done:
            # It has its own way to its weight; GGUF's layers for one.
            self._ignores_functions = True
        reachable = self._linear and isinstance(y, Tensor)
        if pushed and not done and not (reachable and args):
            self.counts.unserved.add(self.name)
            done = True
        if not reachable:
            return None
        if not done:
            with self._timed("beside", y):
                y = self._beside(work, args[0], y)
        for adapter, strength, _ in work.bias:
            delta = adapter.delta(y.shape[-1:], y.dtype, y.device)
            if delta is None:
                self.counts.unserved.add(self.name)
            else:
                y = y.add(delta.view(-1), alpha=strength)
        return y

    def _streams(self, work: Work, x: Tensor) -> bool:
        """Whether a call goes through a changed weight."""
        if self._ignores_functions or not work.steps:
            return False
        if work.through_weight or work.mode == "stream":
            return True
        if torch.compiler.is_compiling() or work.mode == "beside" or self.has_own_product:
            return False
        weight = _parameter(self.module, "weight")
        if weight is None:
            return False
        out, inner = weight.shape[0], x.shape[-1]
        # A weight that is cast anyway is a copy already.
        c = work.c if weight.dtype == x.dtype else work.c / 2
        return x.numel() // max(1, inner) > break_even(inner, out, c)

    def _beside(self, work: Work, x: Tensor, y: Tensor) -> Tensor:
        for step in work.now():
            if isinstance(step, Low):
                self._count("beside")
                y = beside(y, x, step)
                continue
            delta = None
            if step.part is None:
                delta = step.adapter.delta((y.shape[-1], x.shape[-1]), y.dtype, y.device)
            if delta is None:
                self.counts.unserved.add(self.name)
            else:
                self._count("formula")
                y = dense_beside(y, x, delta, step.strength)
        return y

    def _push(self, work: Work) -> None:
        """Let the module work with other parameters until `_restore`."""
        self._pushed, self._done = True, not work.steps
        if work.steps:
            self._replace("weight", lambda weight: self._weight(work, weight))
        if work.bias and (not self._linear or self.through_weight):
            self._replace("bias", lambda bias: self._bias(work, bias))

    def _count(self, what: str) -> None:
        if not torch.compiler.is_compiling():  # it would be compiled anew for each number
            setattr(self.counts, what, getattr(self.counts, what) + 1)

    def _replace(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        module = self.module
        functions = getattr(module, f"{name}_function", None)
        if isinstance(functions, list):
            setattr(module, f"{name}_function", [*functions, function])
            self._undo.append(lambda: setattr(module, f"{name}_function", functions))
            return
        parameter = module._parameters.get(name)
        if parameter is None or parameter.dtype not in _FLOATS:
            return
        changed = nn.Parameter(function(parameter.detach()), requires_grad=False)
        module._parameters[name] = changed
        self._undo.append(lambda: module._parameters.__setitem__(name, parameter))

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._pushed = self._done = False

    def _timed(self, kind: str, tensor: Tensor) -> AbstractContextManager[None]:
        timer = self.counts.timer
        if timer is None or torch.compiler.is_compiling():
            return nullcontext()
        return timer.of(kind, tensor.device)

    def _weight(self, work: Work, weight: Tensor) -> Tensor:
        with self._timed("formula" if work.through_weight else "stream", weight):
            return self._changed(work, weight)

    def _changed(self, work: Work, weight: Tensor) -> Tensor:
        self._done = True
        owned = not self._is_own(weight)
        for step in work.now():
            if isinstance(step, Low):
                self._count("stream")
                weight, owned = into_weight(weight, step, owned=owned), True
            else:
                self._count("formula")
                weight, owned = applied(step, weight), True
        return weight

    def _bias(self, work: Work, bias: Tensor) -> Tensor:
        for formula in work.bias:
            bias = applied(formula, bias)
        return bias

    def _is_own(self, weight: Tensor) -> bool:
        """Whether some memory may be that of the module's parameter."""
        if hasattr(self.module, "_v") or torch.compiler.is_compiling():
            # It may lie in memory that is kept for the next call; or nobody can tell, and what is
            # compiled needs no memory for the copy.
            return True
        parameter = _parameter(self.module, "weight")
        if parameter is None or parameter.is_meta:
            return True
        try:
            return parameter.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            return False  # a tensor of another kind, which was made into this one


class Values:
    """A parameter that is no weight of a module with a forward, such as Wan's modulation.

    Args:
        module: Whose it is.
        name: Of the parameter in it.
        counts: Where it is noted what was done.
    """

    def __init__(self, module: nn.Module, name: str, counts: Counts) -> None:
        self.module, self.name, self.counts = module, name, counts
        self.formulas: Sequence[Formula] = ()
        self._own: nn.Parameter | None = None

    def begin(self) -> None:
        """Before a call of the model: give it other values."""
        parameter = self.module._parameters.get(self.name)
        if not self.formulas or parameter is None:
            return
        value = parameter.detach()
        for formula in self.formulas:
            self.counts.formula += 1
            value = applied(formula, value)
        self._own = parameter
        self.module._parameters[self.name] = nn.Parameter(value, requires_grad=False)

    def end(self) -> None:
        """After the call: its own."""
        if self._own is not None:
            self.module._parameters[self.name] = self._own
        self._own, self.formulas = None, ()


def applied(formula: Formula, weight: Tensor) -> Tensor:
    """A formula on a weight, or on a part of it; the weight is as it was."""
    adapter = formula.adapter.to(weight.device)
    if formula.part is None:
        return adapter.apply(weight, formula.strength)
    result = weight.clone()
    part = weight.narrow(*formula.part)
    result.narrow(*formula.part).copy_(adapter.apply(part, formula.strength))
    return result


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def _is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies the last axis of what it is given."""
    if isinstance(module, nn.Linear):
        return True
    wanted = ("in_features", "out_features")
    weight = _parameter(module, "weight")
    return all(hasattr(module, name) for name in wanted) and (
        weight is None or weight.ndim == 2 or math.prod(weight.shape[2:]) == 1
    )
