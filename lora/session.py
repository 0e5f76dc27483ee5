"""A bank on a model: what every call of the model does with it."""

import re
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .apply import Low, Mode
from .bank import Bank, Layer
from .hooks import Counts, Formula, Site, Steps, Values, Work
from .offload import Residency
from .strengths import Amounts


@dataclass
class _Places:
    """Where LoRAs were applied in a model so far."""

    modules: dict[str, nn.Module]
    sites: dict[str, Site] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)


_places: weakref.WeakKeyDictionary[nn.Module, _Places] = weakref.WeakKeyDictionary()


class Session:
    """Applies a bank during the calls of models.

    Nothing of a model is changed between calls. It may be used with several copies of a model, one
    after the other, and a model with several sessions.

    Args:
        bank: What is applied.
        amounts: How much of it.
        mode: How pairs are applied.
        c: See `apply.break_even`.
        staged: Fetch pairs block by block, wherever the bank is.

    Attributes:
        counts: What was done so far.
    """

    def __init__(
        self,
        bank: Bank,
        amounts: Amounts,
        mode: Mode = "auto",
        c: float = 4.0,
        *,
        staged: bool = False,
    ) -> None:
        self.bank, self.amounts, self.counts = bank, amounts, Counts()
        self._mode: Mode = mode
        self._c, self._staged = c, staged
        self._residency: Residency | None = None
        self._flat: Tensor | None = None
        self._works: dict[str, Work] = {}
        self._values: dict[str, list[Formula]] = {}
        self._known: tuple[object, ...] = ()

    @property
    def residency(self) -> Residency | None:
        """Where the pairs come from, once they were asked for."""
        return self._residency

    @contextmanager
    def call(self, model: nn.Module, device: torch.device) -> Iterator["Call"]:
        """Apply the bank to whatever of a model is called inside.

        Args:
            model: Whose parameters have the names that the bank was made for.
            device: Where it computes.

        Yields:
            What is known of the call.
        """
        self._prepare(device)
        places = _places_of(model)
        known = len(places.sites)
        sites: list[Site] = []
        values: list[Values] = []
        try:
            for name, work in self._works.items():
                site = self._site(model, places, name)
                if site is not None:
                    sites.append(site)
                    site.work, site.counts = work, self.counts
                    site.begin()
            for key, formulas in self._values.items():
                value = self._value(model, places, key)
                if value is not None:
                    values.append(value)
                    value.formulas, value.counts = formulas, self.counts
                    value.begin()
            if len(places.sites) > known:
                _forget_compiled()
            yield Call(sites)
        finally:
            for each in (*sites, *values):
                each.end()

    def release(self) -> None:
        """After a run: let go of the memory of the bank, which others may want until the next."""
        self._works, self._values, self._residency, self._known = {}, {}, None, ()

    def _prepare(self, device: torch.device) -> None:
        """Work out what is to be done, where it is not what was done last."""
        flat = self.bank.flat
        if self._known[:3] != (flat.device, flat.data_ptr(), device):
            self._residency = Residency(self.bank, device, staged=self._staged)
        known = flat.device, flat.data_ptr(), device, self.amounts.version
        if known == self._known:
            return
        # The memory of the amounts stays, for what was compiled or recorded with it.
        if self._flat is None or self._flat.device != device:
            self._flat = self.amounts.flat.to(device, copy=True)
        else:
            self._flat.copy_(self.amounts.flat)
        self._works, self._values = {}, {}
        for layer in self.bank.layers.values():
            self._add(layer)
        self._known = known

    def _add(self, layer: Layer) -> None:
        name, _, leaf = layer.target.key.rpartition(".")
        first, last = self.amounts.rows(layer)
        others = [
            (file, Formula(adapter, strength, layer.target.offset))
            for file, adapter in layer.others
            if (strength := self.amounts.of(layer, file))
        ]
        formulas = [formula for _, formula in others]
        if first == last and not others:
            return
        if leaf not in ("weight", "bias"):
            self._values[layer.target.key] = formulas
            return
        work = self._works.get(name)
        if work is None:
            work = self._works[name] = Work(mode=self._mode, c=self._c)
        if leaf == "bias":
            work.bias = formulas
            return
        work.through_weight |= bool(others)
        before = work.steps
        residency = self._residency
        if residency is None:
            raise RuntimeError("there is no residency; expected it to be prepared")

        def steps() -> Steps:
            made = list(before() if callable(before) else before)
            if not others:
                return [*made, *self._lows(layer, [(first, last)])]
            for file in sorted({file for file, _ in others} | layer.rows.keys()):
                if file in layer.rows and self.amounts.of(layer, file):
                    made += self._lows(layer, [layer.rows[file]])
                made += [formula for number, formula in others if number == file]
            return made

        work.steps = steps() if residency.is_here else steps

    def _lows(self, layer: Layer, spans: list[tuple[int, int]]) -> list[Low]:
        if self._residency is None or self._flat is None:
            raise RuntimeError("there is no residency; expected it to be prepared")
        down, up = self._residency.pairs(layer)
        amounts = self._flat[layer.row : layer.row + layer.rank]
        part = layer.target.offset
        return [Low(down[a:b], up[:, a:b], amounts[a:b], part) for a, b in spans if b > a]

    def _site(self, model: nn.Module, places: _Places, name: str) -> Site | None:
        if name not in places.sites:
            module = places.modules.get(name) if name else model
            if module is None:
                self.counts.unserved.add(name)
                return None
            places.sites[name] = Site(module, name, self.counts)
        return places.sites[name]

    def _value(self, model: nn.Module, places: _Places, key: str) -> Values | None:
        if key not in places.values:
            name, _, leaf = key.rpartition(".")
            if not name:
                return Values(model, leaf, self.counts)  # the model itself is not to be kept
            module = places.modules.get(name)
            if module is None:
                self.counts.unserved.add(key)
                return None
            places.values[key] = Values(module, leaf, self.counts)
        return places.values[key]


class Call:
    """A call of a model that goes on, or is over.

    Args:
        sites: Where something is done in it.
    """

    def __init__(self, sites: list[Site]) -> None:
        self._sites = sites

    def missed(self) -> list[str]:
        """After the model was called: modules of which it read the weight without calling them.

        They are served through their weight from the next call on, so that this one should be
        made again.
        """
        missed = [
            site
            for site in self._sites
            if not site.fired and not site.through_weight and site.has_own_product
        ]
        for site in missed:
            site.through_weight = True
        return [site.name for site in missed]


def _places_of(model: nn.Module) -> _Places:
    if model not in _places:
        # Not the model itself, which this would keep alive.
        modules = {
            re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", name): module
            for name, module in model.named_modules()
            if module is not model
        }
        modules.pop("", None)  # what a model is weakly known by may not hold the model
        _places[model] = _Places(modules)
    return _places[model]


def _forget_compiled() -> None:
    """What was compiled before there were hooks does not know of them."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
