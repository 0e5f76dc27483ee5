"""A bank on a model: applied in every call of the model."""

import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from .bank import Amounts, Bank, BankLayer
from .deltas import ApplyMode, JoinedPairs, ScaledFunction
from .hooks import Counts, Deltas, LayerHook, LayerWork, replace_parameter
from .substitution import is_seen_by_compiled_code

# A delta, or what gives it in the call.
_Part = ScaledFunction | Callable[[], JoinedPairs]

# The modules of a model by name, and the hooks that some of them have.
_models: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, nn.Module], dict[str, LayerHook]]] = (
    weakref.WeakKeyDictionary()
)


class Session:
    """Applies a bank during the calls of models, which are unchanged between calls.

    It serves copies of a model, one after the other, and a model can have several sessions. If the
    bank is not on the device of the computation, a layer's pairs are copied there when it needs
    them: they are about a hundredth of a model. `counts` has the deltas that were applied so far.
    """

    def __init__(self, bank: Bank, amounts: Amounts, mode: ApplyMode = "auto") -> None:
        self.bank, self.amounts, self.counts = bank, amounts, Counts()
        self._mode: ApplyMode = mode
        self._flat: Tensor | None = None
        self._layers: dict[str, list[BankLayer]] = {}  # by key of the parameter
        for layer in bank.layers.values():
            self._layers.setdefault(layer.target.key, []).append(layer)
        self._works: dict[str, LayerWork] = {}
        self._values: dict[str, list[_Part]] = {}
        self._known: tuple[object, ...] = ()
        self._is_new = True  # a run starts

    @contextmanager
    def call(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """Apply the bank to every call of a model, on its `device`, within the block."""
        self._prepare(device)
        modules, hooks = _known(model, anew=self._is_new)
        self._is_new = False
        foreign = False
        with ExitStack() as stack:
            for name, work in self._works.items():
                if name not in hooks:
                    module = self._module(model, modules, name, name)
                    if module is None:
                        continue
                    hooks[name] = LayerHook(module, name)
                    foreign = foreign or not is_seen_by_compiled_code(module)
                hooks[name].begin(work)
                stack.callback(hooks[name].end)
            for key, parts in self._values.items():
                name, _, leaf = key.rpartition(".")
                module = self._module(model, modules, name, key)
                own = None if module is None else module._parameters.get(leaf)
                if module is not None and own is not None:
                    value = getattr(own, "unchanged", own).detach()
                    for delta in _deltas(parts):
                        self.counts.add(delta, "stream")
                        value = delta.into_weight(value, owned=False)
                    stack.callback(replace_parameter(module, leaf, value))
            if foreign and "torch._dynamo" in sys.modules:
                # Code compiled before the hooks existed does not include them.
                torch.compiler.reset()
            yield

    def release(self) -> None:
        """Release the memory of the bank after a run, until the next run."""
        self._works, self._values, self._known, self._is_new = {}, {}, (), True

    def _module(
        self, model: nn.Module, modules: dict[str, nn.Module], name: str, key: str
    ) -> nn.Module | None:
        module = modules.get(name) if name else model
        if module is None:
            self.counts.unserved.add(key)
        return module

    def _prepare(self, device: torch.device) -> None:
        """Prepare the work of the layers, unless it is unchanged."""
        if self.bank.flat.device != device:
            self.bank.pin()
        known = *self.bank.place, device, self.amounts.version
        if known == self._known:
            return
        # The memory of the amounts stays the same, because compiled or captured code refers to it.
        if self._flat is None or self._flat.device != device:
            with torch.inference_mode(False):  # another thread can write it without that mode
                self._flat = self.amounts.flat.to(device, copy=True)
        else:
            self._flat.copy_(self.amounts.flat)
        self._works, self._values = {}, {}
        for key, layers in self._layers.items():
            if parts := [part for each in layers for part in self._parts(each, device, self._flat)]:
                self._assign(key, parts, layers, is_here=self.bank.flat.device == device)
        self._known = known

    def _assign(
        self, key: str, parts: list[_Part], layers: list[BankLayer], *, is_here: bool
    ) -> None:
        """Give the module of the parameter `key` its work."""
        name, _, leaf = key.rpartition(".")
        if leaf not in ("weight", "bias"):
            self._values[key] = parts
            return
        work = self._works.setdefault(name, LayerWork(self.counts, self._mode))
        functions = [part for part in parts if isinstance(part, ScaledFunction)]
        if leaf == "bias":  # of which there are no pairs
            work.bias = functions
            return
        work.deltas = _deltas(parts) if is_here else functools.partial(_deltas, parts)
        work.needs_weight = bool(functions)
        if self._mode == "auto":
            rms = self.amounts.rms  # without this session, which has the work
            work.rms = lambda: min(filter(None, map(rms, layers)), default=0.0)

    def _parts(self, layer: BankLayer, device: torch.device, amounts: Tensor) -> list[_Part]:
        """Return the active parts of a layer, in the order of the files where it matters."""
        others = [
            (file, ScaledFunction(function, strength, layer.target.offset))
            for file, function in self.bank.functions(layer)
            if (strength := self.amounts.of(layer, file))
        ]
        joined = functools.partial(_pairs, self.bank, layer, amounts, self.counts, device)
        if not others:
            first, last = self.amounts.rows(layer)
            return [functools.partial(joined, first, last)] if last > first else []
        parts: list[_Part] = []
        for file in sorted({file for file, _ in others} | layer.rows.keys()):
            if file in layer.rows and self.amounts.of(layer, file):
                parts.append(functools.partial(joined, *layer.rows[file]))
            parts += [other for number, other in others if number == file]
        return parts


def _pairs(
    bank: Bank,
    layer: BankLayer,
    amounts: Tensor,
    counts: Counts,
    device: torch.device,
    first: int,
    last: int,
) -> JoinedPairs:
    """Return the rows `first` to `last` of the joined pairs of a layer, on a device."""
    down, up = layer.pairs(bank.flat, device)
    if bank.flat.device != device:
        counts.fetched_bytes += down.nbytes + up.nbytes
    rows = amounts[layer.row + first : layer.row + last]
    return JoinedPairs(down[first:last], up[:, first:last], rows, layer.target.offset)


def _deltas(parts: Sequence[_Part]) -> Deltas:
    return [part if isinstance(part, ScaledFunction) else part() for part in parts]


def _known(model: nn.Module, *, anew: bool) -> tuple[dict[str, nn.Module], dict[str, LayerHook]]:
    """Return the modules of a model by name, `anew` if others can have been put in, and hooks."""
    if anew or model not in _models:
        # Without the model itself, which this would keep alive.
        modules = {
            re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", name): module
            for name, module in model.named_modules()
            if module is not model
        }
        modules.pop("", None)  # a value must not refer to the weak key
        _, hooks = _models.get(model, ({}, {}))
        kept = {name: hook for name, hook in hooks.items() if modules.get(name) is hook.module}
        _models[model] = modules, kept
    return _models[model]
