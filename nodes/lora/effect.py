"""How much of the effect of LoRAs survives in the weights of a model, for the report of a node."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...lora import LEAST_KEPT, Bank, BankLayer, StackEntry, kept, layer_name, sample_of
from .targets import NETWORK

# Losses below half a percent are not worth a line.
_ALMOST_ALL = 0.995


class Survival:
    """The shares of deltas that survive the rounding of the weights that they are added to.

    Args:
        dtype: Dtype of the sums.
        mode: How the LoRAs are applied.
    """

    def __init__(self, dtype: torch.dtype, mode: str) -> None:
        self._dtype, self._mode = dtype, mode
        self._shares: list[tuple[float, float]] = []  # of each delta: its energy, and the share

    def add(self, weight: Tensor | None, rms: float, numel: int) -> None:
        """Add a delta.

        Args:
            weight: `[out, in, ...]`; None: the model does not have it.
            rms: Root mean square of the delta.
            numel: Number of elements of the delta.
        """
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
    """Return a line about deltas that are too small for the weights that they are added to.

    Args:
        bank: The LoRAs.
        parts: The entries of the stack with their phases; the largest strength of each counts.
        parameters: Parameters of the model by name, `[...]`.
        mode: How the LoRAs are applied.

    Returns:
        One line, or none.
    """
    survival = Survival(bank.flat.dtype, mode)
    if mode != "bypass" and bank.flat.dtype != torch.float32:
        numbers = {file.path: number for number, file in enumerate(bank.files)}
        for layer in bank.layers.values():
            strengths = _strengths(layer, parts, numbers)
            weight, numel = parameters.get(layer.target.key), layer.size[0] * layer.size[1]
            bypassed = len(layer.shape) == 2 and not layer.others
            if bypassed or mode != "auto":
                survival.add(weight, bank.rms(layer, strengths), numel)
    return survival.lines()


def _strengths(
    layer: BankLayer,
    parts: Sequence[tuple[StackEntry, int | None]],
    numbers: Mapping[str, int],
) -> dict[int, float]:
    """Return the strengths of a layer by file number."""
    name = layer_name(layer.target.key, NETWORK)
    strengths: dict[int, float] = {}
    for entry, phase in parts:
        number = numbers[str(Path(entry.path).absolute())]
        strength = max(entry.schedule.values(phase), key=abs) * entry.blocks.factor(name)
        strengths[number] = strengths.get(number, 0.0) + strength
    return strengths
