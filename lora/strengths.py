"""How much of each LoRA there is: strengths and block filters as one vector for a bank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .bank import Bank, Layer
from .blocks import Blocks


@dataclass(frozen=True)
class Share:
    """One entry of a stack: a file of a bank in some blocks of the model.

    Attributes:
        file: The number of the file in the bank.
        blocks: Where it is applied, and how strongly.
    """

    file: int
    blocks: Blocks


class Amounts:
    """The factors of all rows of a bank, for the strengths that its entries have at the moment.

    Args:
        bank: What they are for.
        shares: The entries of the stack.
        prefix: What is before the names that block filters see.

    Attributes:
        flat: `[rows]` in float32: alpha / rank, times strength, times the factor of the block.
        version: Grows when they change.
    """

    def __init__(
        self, bank: Bank, shares: Sequence[Share], prefix: str = "diffusion_model."
    ) -> None:
        self._bank, self._shares = bank, tuple(shares)
        self._factors = torch.zeros(len(self._shares), bank.scales.numel())
        self._blocks: dict[tuple[int, str], float] = {}
        for number, share in enumerate(self._shares):
            for layer in bank.layers.values():
                name = layer_name(layer.target.key, prefix)
                factor = self._blocks[number, layer.target.key] = share.blocks.factor(name)
                if share.file in layer.rows:
                    first, last = layer.rows[share.file]
                    self._factors[number, layer.row + first : layer.row + last] = factor
        self._strengths: tuple[float, ...] = ()
        self.flat = torch.zeros_like(bank.scales)
        self.version = 0
        self.set((0.0,) * len(self._shares))

    def set(self, strengths: Sequence[float]) -> None:
        """Take over strengths, one for each entry."""
        strengths = tuple(strengths)
        if strengths == self._strengths:
            return
        self._strengths = strengths
        self.version += 1
        values = torch.tensor(strengths, dtype=torch.float64)
        self.flat = (values @ self._factors.double() * self._bank.scales.double()).float()

    def rows(self, layer: Layer) -> tuple[int, int]:
        """The rows of a layer that are at work: first, last + 1; equal: none."""
        at_work = [layer.rows[file] for file in layer.rows if self.of(layer, file)]
        if not at_work:
            return 0, 0
        return min(first for first, _ in at_work), max(last for _, last in at_work)

    def of(self, layer: Layer, file: int) -> float:
        """The strength of a file in a layer."""
        return sum(
            strength * self._blocks[number, layer.target.key]
            for number, (share, strength) in enumerate(
                zip(self._shares, self._strengths, strict=True)
            )
            if share.file == file
        )


def layer_name(key: str, prefix: str) -> str:
    """What a block filter is told of a parameter: the name of its layer.

    Args:
        key: As in the state dict.
        prefix: What is before the names that are meant.
    """
    return key.removeprefix(prefix).removesuffix(".weight").removesuffix(".bias")
