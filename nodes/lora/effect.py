"""How much of the effect of LoRAs survives in the weights of a model, for the report of a node."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...lora import LEAST_KEPT, Amounts, Bank, StackEntry, kept, sample_of
from .targets import NETWORK

# Losses below half a percent are not worth a line.
_ALMOST_ALL = 0.995


class Survival:
    """The shares of deltas that survive the rounding of the weights that they are added to."""

    def __init__(self, dtype: torch.dtype, mode: str) -> None:
        self._dtype, self._mode = dtype, mode
        self._shares: list[tuple[float, float]] = []  # of each delta: its energy, and the share

    def add(self, weight: Tensor | None, rms: float, numel: int) -> None:
        """Add a delta of `numel` elements to a weight `[out, in, ...]`; None: it has none."""
        sample = None if weight is None or rms == 0 else sample_of(weight)
        if sample is not None:
            self._shares.append((rms**2 * numel, kept(sample, rms, self._dtype)))

    def lines(self) -> list[str]:
        """Return a line about the deltas that are too small, or none."""
        shares = self._shares
        if self._mode == "auto":
            shares = [(energy, share) for energy, share in shares if share < LEAST_KEPT]
        total = sum(energy for energy, _ in shares)
        mean = sum(energy * share for energy, share in shares) / total if total else 1.0
        if self._mode == "bypass" or mean > _ALMOST_ALL:
            return []
        name = str(self._dtype).removeprefix("torch.")
        if self._mode == "auto":
            return [
                f"small deltas: bypass for {len(shares)} layers; {name} weights would keep "
                f"{mean:.0%} of their effect"
            ]
        return [
            f"small deltas: {name} weights keep {mean:.0%} of the effect; bypass does not use them"
        ]


def effect_lines(
    bank: Bank,
    parts: Sequence[tuple[StackEntry, int | None]],
    parameters: Mapping[str, Tensor],
    mode: str,
) -> list[str]:
    """Return a line about deltas that are too small for the weights that they are added to."""
    survival = Survival(bank.flat.dtype, mode)
    if mode != "bypass" and bank.flat.dtype != torch.float32:
        amounts = Amounts(bank, [entry for entry, _ in parts], NETWORK)
        amounts.set([max(entry.schedule.values(phase), key=abs) for entry, phase in parts])
        for layer in bank.layers.values():
            bypassed = len(layer.shape) == 2 and not layer.others
            if bypassed or mode != "auto":
                weight, numel = parameters.get(layer.target.key), layer.size[0] * layer.size[1]
                survival.add(weight, amounts.rms(layer), numel)
    return survival.lines()
