"""A bank on a model: applied in every call of the model."""

import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .adapters import Adapter
from .apply import ApplyMode, JoinedPairs, ScaledAdapter
from .bank import Bank, BankLayer
from .hooks import Counts, Deltas, LayerHook, LayerWork, replace_parameter
from .offload import BankLoader
from .strengths import Amounts
from .substitution import is_seen_by_compiled_code


class _Rows(NamedTuple):
    """Rows of the joined pairs of a layer: first, last + 1."""

    first: int
    last: int


class _Other(NamedTuple):
    """Another adapter of a layer, by its place among them, and its strength."""

    place: int
    strength: float


# What changes a parameter: a layer of the bank, and its active parts in order.
_Plan = list[tuple[BankLayer, list[_Rows | _Other]]]

# The modules of a model by name, and the hooks that some of them have.
_models: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, nn.Module], dict[str, LayerHook]]] = (
    weakref.WeakKeyDictionary()
)


class Session:
    """Applies a bank during the calls of models.

    A model is unchanged between calls. A session can be used with several copies of a model, one
    after the other, and a model with several sessions.

    Args:
        bank: The bank.
        amounts: The strengths.
        mode: How deltas are applied.
        staged: As in `BankLoader`.

    Attributes:
        counts: The applied deltas so far.
        loader: The source of the pairs; None: not needed yet.
    """

    def __init__(
        self,
        bank: Bank,
        amounts: Amounts,
        mode: ApplyMode = "auto",
        *,
        staged: bool = False,
    ) -> None:
        self.bank, self.amounts, self.counts = bank, amounts, Counts()
        self.loader: BankLoader | None = None
        self._mode: ApplyMode = mode
        self._staged = staged
        self._flat: Tensor | None = None
        self._works: dict[str, LayerWork] = {}
        self._values: dict[str, _Plan] = {}
        self._known: tuple[object, ...] = ()
        self._is_new = True  # a run starts

    @contextmanager
    def call(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """Apply the bank to every call of a model within the block.

        Args:
            model: A model with the parameter names that the bank was made for.
            device: Device of its computation.
        """
        loader = self._prepare(device)
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
            for key, plan in self._values.items():
                name, _, leaf = key.rpartition(".")
                module = self._module(model, modules, name, key)
                own = None if module is None else module._parameters.get(leaf)
                if module is not None and own is not None:
                    value = own.detach()
                    for delta in self._value_deltas(loader, plan):
                        self.counts.add(delta, "stream")
                        value = delta.into_weight(value, owned=False)
                    stack.callback(replace_parameter(module, leaf, value))
            if foreign and "torch._dynamo" in sys.modules:
                # Code compiled before the hooks existed does not include them.
                torch.compiler.reset()
            yield

    def release(self) -> None:
        """Release the memory of the bank after a run, until the next run."""
        self._works, self._values, self.loader, self._known = {}, {}, None, ()
        self._is_new = True

    def _module(
        self, model: nn.Module, modules: dict[str, nn.Module], name: str, key: str
    ) -> nn.Module | None:
        module = modules.get(name) if name else model
        if module is None:
            self.counts.unserved.add(key)
        return module

    def _prepare(self, device: torch.device) -> BankLoader:
        """Prepare the work of the layers, unless it is unchanged; return the loader."""
        if self.loader is None or self._known[:-1] != (*self._place(), device):
            self.loader = BankLoader(self.bank, device, staged=self._staged)  # may move the bank
        known = *self._place(), device, self.amounts.version
        if known == self._known:
            return self.loader
        # The memory of the amounts stays the same, because compiled or captured code refers to it.
        if self._flat is None or self._flat.device != device:
            with torch.inference_mode(False):  # another thread can write it without that mode
                self._flat = self.amounts.flat.to(device, copy=True)
        else:
            self._flat.copy_(self.amounts.flat)
        self._works, self._values = {}, {}
        plans: dict[tuple[str, str], _Plan] = {}
        for layer in self.bank.layers.values():
            if parts := self._parts(layer):
                name, _, leaf = layer.target.key.rpartition(".")
                if leaf not in ("weight", "bias"):
                    self._values.setdefault(layer.target.key, []).append((layer, parts))
                    continue
                plans.setdefault((name, leaf), []).append((layer, parts))
        for (name, leaf), plan in plans.items():
            work = self._works.setdefault(name, LayerWork(self.counts, self._mode))
            if leaf == "bias":
                adapters = functools.partial(_scaled, self.loader.adapters, plan)
                work.bias = adapters() if self.loader.is_here else adapters
                continue
            deltas = functools.partial(_deltas, self.loader, self._flat, plan)
            work.deltas = deltas() if self.loader.is_here else deltas
            work.needs_weight = any(isinstance(part, _Other) for _, parts in plan for part in parts)
            if self._mode == "auto":
                work.rms = functools.partial(_least_rms, self.amounts, plan)
        self._known = known
        return self.loader

    def _value_deltas(self, loader: BankLoader, plan: _Plan) -> Deltas:
        """Return the deltas of a parameter that is neither a weight nor a bias."""
        if self._flat is None or not any(layer.rank for layer, _ in plan):
            return _scaled(loader.kept_adapters, plan)
        return _deltas(loader, self._flat, plan)

    def _place(self) -> tuple[object, ...]:
        """Return the place of the bank's memory."""
        bank = self.bank
        both = bank.flat, bank.others
        return *(each.device for each in both), *(each.data_ptr() for each in both)

    def _parts(self, layer: BankLayer) -> list[_Rows | _Other]:
        """Return the active parts of a layer, in the order of the files where it matters."""
        rows = self.amounts.rows(layer)
        others = [
            (stored.file, _Other(place, strength))
            for place, stored in enumerate(layer.others)
            if (strength := self.amounts.of(layer, stored.file))
        ]
        if not others:
            return [_Rows(*rows)] if rows[1] > rows[0] else []
        parts: list[_Rows | _Other] = []
        for file in sorted({file for file, _ in others} | layer.rows.keys()):
            if file in layer.rows and self.amounts.of(layer, file):
                parts.append(_Rows(*layer.rows[file]))
            parts += [other for number, other in others if number == file]
        return parts


def _deltas(loader: BankLoader, amounts: Tensor, plan: _Plan) -> Deltas:
    deltas: list[JoinedPairs | ScaledAdapter] = []
    for layer, parts in plan:
        adapters = loader.adapters(layer) if layer.others else []
        for part in parts:
            if isinstance(part, _Other):
                adapter = adapters[part.place]
                deltas.append(ScaledAdapter(adapter, part.strength, layer.target.offset))
                continue
            down, up = loader.pairs(layer)
            rows = amounts[layer.row + part.first : layer.row + part.last]
            pairs = down[part.first : part.last], up[:, part.first : part.last]
            deltas.append(JoinedPairs(*pairs, rows, layer.target.offset))
    return deltas


def _least_rms(amounts: Amounts, plan: _Plan) -> float:
    return min(amounts.rms(layer) for layer, _ in plan)


def _scaled(adapters_of: Callable[[BankLayer], list[Adapter]], plan: _Plan) -> list[ScaledAdapter]:
    """Return the adapters of a parameter that has no pairs."""
    return [
        ScaledAdapter(adapters_of(layer)[part.place], part.strength, layer.target.offset)
        for layer, parts in plan
        for part in parts
        if isinstance(part, _Other)
    ]


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
