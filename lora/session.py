"""A bank on a model: applied in every call of the model."""

import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from .apply import ApplyMode, JoinedPairs, ScaledAdapter
from .bank import Bank, BankLayer
from .hooks import Counts, Deltas, LayerHook, LayerWork, replace_parameter, with_adapters
from .offload import PairLoader
from .strengths import Amounts

# The change of a layer: rows of its joined pairs (first, last + 1), or another adapter.
_Part = tuple[int, int] | ScaledAdapter

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
        c: As in `apply.break_even`.
        staged: As in `PairLoader`.

    Attributes:
        counts: The applied deltas so far.
        loader: The source of the pairs; None: not needed yet.
    """

    def __init__(
        self,
        bank: Bank,
        amounts: Amounts,
        mode: ApplyMode = "auto",
        c: float = 4.0,
        *,
        staged: bool = False,
    ) -> None:
        self.bank, self.amounts, self.counts = bank, amounts, Counts()
        self.loader: PairLoader | None = None
        self._mode: ApplyMode = mode
        self._c, self._staged = c, staged
        self._flat: Tensor | None = None
        self._works: dict[str, LayerWork] = {}
        self._values: dict[str, list[ScaledAdapter]] = {}
        self._known: tuple[object, ...] = ()

    @contextmanager
    def call(self, model: nn.Module, device: torch.device) -> Iterator[Callable[[], list[str]]]:
        """Apply the bank to every call of a model within the block.

        Args:
            model: A model with the parameter names that the bank was made for.
            device: Device of its computation.

        Yields:
            A function to call after the model: it returns the names of modules whose weight was
            read without a call of the module. The next call applies LoRAs to their weight, so
            repeat this call.
        """
        self._prepare(device)
        modules, hooks = _known(model)
        active: list[LayerHook] = []
        count = len(hooks)
        with ExitStack() as stack:
            for name, work in self._works.items():
                if name not in hooks:
                    module = self._module(model, modules, name, name)
                    if module is None:
                        continue
                    hooks[name] = LayerHook(module, name)
                active.append(hooks[name])
                stack.callback(hooks[name].end)
                hooks[name].begin(work)
            for key, adapters in self._values.items():
                name, _, leaf = key.rpartition(".")
                module = self._module(model, modules, name, key)
                own = None if module is None else module._parameters.get(leaf)
                if module is not None and own is not None:
                    self.counts.formula += len(adapters)
                    value = with_adapters(adapters, own.detach())
                    stack.callback(replace_parameter(module, leaf, value))
            if len(hooks) > count and "torch._dynamo" in sys.modules:
                # Code compiled before the hooks existed does not include them.
                torch.compiler.reset()
            yield functools.partial(_missed, active)

    def release(self) -> None:
        """Release the memory of the bank after a run, until the next run."""
        self._works, self._values, self.loader, self._known = {}, {}, None, ()

    def _module(
        self, model: nn.Module, modules: dict[str, nn.Module], name: str, key: str
    ) -> nn.Module | None:
        module = modules.get(name) if name else model
        if module is None:
            self.counts.unserved.add(key)
        return module

    def _prepare(self, device: torch.device) -> None:
        """Prepare the work of the layers, unless it is unchanged."""
        flat = self.bank.flat
        if self.loader is None or self._known[:3] != (flat.device, flat.data_ptr(), device):
            self.loader = PairLoader(self.bank, device, staged=self._staged)  # may move `flat`
        known = flat.device, flat.data_ptr(), device, self.amounts.version
        if known == self._known:
            return
        # The memory of the amounts stays the same, because compiled or captured code refers to it.
        if self._flat is None or self._flat.device != device:
            self._flat = self.amounts.flat.to(device, copy=True)
        else:
            self._flat.copy_(self.amounts.flat)
        self._works, self._values = {}, {}
        plans: dict[str, list[tuple[BankLayer, list[_Part]]]] = {}
        for layer in self.bank.layers.values():
            if parts := self._parts(layer):
                name, _, leaf = layer.target.key.rpartition(".")
                adapters = [part for part in parts if isinstance(part, ScaledAdapter)]
                if leaf not in ("weight", "bias"):
                    self._values[layer.target.key] = adapters
                    continue
                if name not in self._works:
                    self._works[name] = LayerWork(self.counts, self._mode, self._c)
                if leaf == "bias":
                    self._works[name].bias = adapters
                else:
                    self._works[name].needs_weight |= bool(adapters)
                    plans.setdefault(name, []).append((layer, parts))
        for name, plan in plans.items():
            deltas = functools.partial(_deltas, self.loader, self._flat, plan)
            self._works[name].deltas = deltas() if self.loader.is_here else deltas
        self._known = known

    def _parts(self, layer: BankLayer) -> list[_Part]:
        """Return the active parts of a layer, in the order of the files where it matters."""
        first, last = self.amounts.rows(layer)
        others = [
            (file, ScaledAdapter(adapter, strength, layer.target.offset))
            for file, adapter in layer.others
            if (strength := self.amounts.of(layer, file))
        ]
        if not others:
            return [(first, last)] if last > first else []
        parts: list[_Part] = []
        for file in sorted({file for file, _ in others} | layer.rows.keys()):
            if file in layer.rows and self.amounts.of(layer, file):
                parts.append(layer.rows[file])
            parts += [adapter for number, adapter in others if number == file]
        return parts


def _deltas(
    loader: PairLoader, amounts: Tensor, plan: list[tuple[BankLayer, list[_Part]]]
) -> Deltas:
    deltas: list[JoinedPairs | ScaledAdapter] = []
    for layer, parts in plan:
        for part in parts:
            if isinstance(part, ScaledAdapter):
                deltas.append(part)
                continue
            first, last = part
            down, up = loader.pairs(layer)
            rows = amounts[layer.row + first : layer.row + last]
            deltas.append(
                JoinedPairs(down[first:last], up[:, first:last], rows, layer.target.offset)
            )
    return deltas


def _missed(hooks: list[LayerHook]) -> list[str]:
    missed = [hook for hook in hooks if hook.missed]
    for hook in missed:
        hook.through_weight = True
    return [hook.name for hook in missed]


def _known(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, LayerHook]]:
    if model not in _models:
        # Without the model itself, which this would keep alive.
        modules = {
            re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", name): module
            for name, module in model.named_modules()
            if module is not model
        }
        modules.pop("", None)  # a value must not refer to the weak key
        _models[model] = modules, {}
    return _models[model]
