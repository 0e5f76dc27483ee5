"""Hooks on the modules of a model, which apply LoRAs during a call.

The hooks leave a module's forward untouched, whether its own or another pack's. They are registered
once and do nothing between calls; `torch.compile` sees that from the attribute that they read. No
weight is written: the change is made to a copy. A module that applies functions to its weights
after casting (ComfyUI's have `weight_function` and `bias_function`) gets a function for the time of
its forward; any other module gets another parameter for that time.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .apply import ApplyMode, JoinedPairs, ScaledAdapter, break_even

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass
class Counts:
    """Number of deltas that were applied, by method.

    Attributes:
        stream: Pairs added to the weight.
        bypass: Pairs added to the output.
        formula: Adapters other than pairs.
        unserved: Names of modules whose weights could not be reached.
        timed: Measures work of one of these kinds on a device; None: nothing is measured.
    """

    stream: int = 0
    bypass: int = 0
    formula: int = 0
    unserved: set[str] = field(default_factory=set)
    timed: Callable[[str, torch.device], AbstractContextManager[None]] | None = None

    def add(self, delta: JoinedPairs | ScaledAdapter, way: str) -> None:
        """Count `delta`, which was applied by `way`."""
        if not torch.compiler.is_compiling():  # each number would be compiled separately
            kind = "formula" if isinstance(delta, ScaledAdapter) else way
            setattr(self, kind, getattr(self, kind) + 1)

    def clear(self) -> None:
        """Reset the counts."""
        self.stream = self.bypass = self.formula = 0


Deltas = Sequence[JoinedPairs | ScaledAdapter]


@dataclass
class LayerWork:
    """The work at a module in a call; `c` as in `break_even`.

    Attributes:
        counts: Where the work is counted.
        mode: How deltas are applied.
        c: Constant of the machine.
        deltas: Deltas of the weight in order, or a function that returns them in the call.
        needs_weight: There are adapters other than pairs among them.
        bias: Adapters of the bias.
    """

    counts: Counts
    mode: ApplyMode
    c: float
    deltas: Deltas | Callable[[], Deltas] = ()
    needs_weight: bool = False
    bias: Sequence[ScaledAdapter] = ()

    def now(self) -> Deltas:
        """Return the deltas of the weight."""
        return self.deltas() if callable(self.deltas) else self.deltas


class LayerHook:
    """The hooks of one module.

    Attributes:
        work: The work of the current call of the model; None: nothing to do.
        through_weight: Its forward is not called, so everything is applied to its weight.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.work: LayerWork | None = None
        self.through_weight = self._fired = False
        self._ignores_functions = False
        self._undo: list[Callable[[], None]] = []
        self._done = self._pushed = False
        weight = _parameter(module, "weight")
        self._linear = weight is not None and _is_linear(module)
        module.register_forward_pre_hook(self._before)
        # Hooks of other packs get the output with the LoRAs.
        module.register_forward_hook(self._after, prepend=True)

    def begin(self, work: LayerWork) -> None:
        """Prepare for a call of the model with `work`."""
        self.work, self._fired = work, False
        if self.through_weight:
            self._push(work)

    def end(self) -> None:
        """Clean up after the call, also after an error."""
        self._restore()
        self.work = None

    @property
    def missed(self) -> bool:
        """Whether the model's call skipped the module but may have read its weight.

        Only for quantised weights: a plain weight of a module that is not called counts as unused.
        """
        return not self._fired and not self.through_weight and self._has_own_product

    @property
    def _has_own_product(self) -> bool:
        """Whether the module multiplies without casting its weight to a plain tensor first."""
        weight = _parameter(self.module, "weight")
        if weight is None or getattr(self.module, "_full_precision_mm", False):
            return False
        if type(weight) not in (Tensor, nn.Parameter):
            return True
        fp8 = "fp8_ops" in type(self.module).__qualname__ and weight.element_size() == 1
        return fp8 or not weight.is_floating_point()

    def _before(self, module: nn.Module, args: tuple) -> None:
        work = self.work
        if work is None or self.through_weight:
            return
        self._fired = True
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
            # The module reads its weight in its own way, as GGUF's layers do.
            self._ignores_functions = True
        reachable = self._linear and isinstance(y, Tensor)
        if pushed and not done and not (reachable and args):
            work.counts.unserved.add(self.name)
            done = True
        if not reachable:
            return None
        if not done:
            with self._timed(work, "bypass", y):
                for delta in work.now():
                    added = delta.bypass(y, args[0])
                    if added is None:
                        work.counts.unserved.add(self.name)
                    else:
                        work.counts.add(delta, "bypass")
                        y = added
        for adapter in work.bias:
            delta = adapter.adapter.delta(y.shape[-1:], y.dtype, y.device)
            if delta is None:
                work.counts.unserved.add(self.name)
            else:
                y = y.add(delta.view(-1), alpha=adapter.strength)
        return y

    def _streams(self, work: LayerWork, x: Tensor) -> bool:
        """Return whether a call uses a changed weight."""
        if self._ignores_functions or not work.deltas:
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
        c = work.c if weight.dtype == x.dtype else work.c / 2
        return x.numel() // max(1, inner) > break_even(inner, out, c)

    def _push(self, work: LayerWork) -> None:
        """Give the module other parameters until `_restore`."""
        self._pushed, self._done = True, not work.deltas
        if work.deltas:
            self._replace("weight", lambda weight: self._weight(work, weight))
        if work.bias and (not self._linear or self.through_weight):
            self._replace("bias", lambda bias: with_adapters(work.bias, bias))

    def _replace(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        functions = getattr(self.module, f"{name}_function", None)
        parameter = self.module._parameters.get(name)
        if isinstance(functions, list):
            setattr(self.module, f"{name}_function", [*functions, change])
            self._undo.append(lambda: setattr(self.module, f"{name}_function", functions))
        elif parameter is not None and parameter.dtype in _FLOATS:
            changed = change(parameter.detach())
            self._undo.append(replace_parameter(self.module, name, changed))

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._pushed = self._done = False

    def _timed(self, work: LayerWork, kind: str, like: Tensor) -> AbstractContextManager[None]:
        timed = work.counts.timed
        if timed is None or torch.compiler.is_compiling():
            return nullcontext()
        return timed(kind, like.device)

    def _weight(self, work: LayerWork, weight: Tensor) -> Tensor:
        self._done = True
        owned = not self._is_own(weight)
        with self._timed(work, "formula" if work.needs_weight else "stream", weight):
            for delta in work.now():
                work.counts.add(delta, "stream")
                weight, owned = delta.into_weight(weight, owned=owned), True
        return weight

    def _is_own(self, weight: Tensor) -> bool:
        """Return whether some memory may belong to the module's parameter."""
        if hasattr(self.module, "_v") or torch.compiler.is_compiling():
            # It may be memory that is kept for the next call, or unknown; and compiled code needs
            # no memory for the copy.
            return True
        parameter = _parameter(self.module, "weight")
        if parameter is None or parameter.is_meta:
            return True
        try:
            return parameter.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            return False  # another kind of tensor, which was converted to this one


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> Callable[[], None]:
    """Replace a parameter of a module.

    Args:
        module: The module.
        name: Name of the parameter.
        value: The new value, `[...]`.

    Returns:
        A function that restores the parameter.
    """
    own = module._parameters[name]
    module._parameters[name] = nn.Parameter(value, requires_grad=False)
    return lambda: module._parameters.__setitem__(name, own)


def with_adapters(adapters: Sequence[ScaledAdapter], value: Tensor) -> Tensor:
    """Return `value` `[...]`, a parameter that is not a matrix, with `adapters` applied."""
    for adapter in adapters:
        value = adapter.into_weight(value)
    return value


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
