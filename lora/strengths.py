"""How much of each LoRA there is: strengths and block filters as one vector for a bank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .bank import Bank, BankLayer
from .blocks import Blocks
from .schedule import Schedule


@dataclass(frozen=True)
class StackEntry:
    """A LoRA of a stack, as users chain them."""

    path: str | Path
    schedule: Schedule
    blocks: Blocks


class Amounts:
    """The factors of all rows of a bank, for the strengths that a stack has at the moment.

    The bank has the files of all entries. Block filters see names without the `prefix`.

    Attributes:
        flat: `[rows]` in float32: alpha / rank, times strength, times the factor of the block.
        version: Grows when they change.
    """

    def __init__(
        self, bank: Bank, stack: Sequence[StackEntry], prefix: str = "diffusion_model."
    ) -> None:
        self._bank = bank
        numbers = {file.path: number for number, file in enumerate(bank.files)}
        self._files = [numbers[str(Path(entry.path).absolute())] for entry in stack]
        self._factors = torch.zeros(len(stack), bank.scales.numel())
        self._blocks: list[dict[str, float]] = []
        for row, file, entry in zip(self._factors, self._files, stack, strict=True):
            blocks: dict[str, float] = {}
            for layer in bank.layers.values():
                name = layer_name(layer.target.key, prefix)
                factor = blocks[layer.target.key] = entry.blocks.factor(name)
                if file in layer.rows:
                    first, last = layer.rows[file]
                    row[layer.row + first : layer.row + last] = factor
            self._blocks.append(blocks)
        self._strengths: tuple[float, ...] = ()
        self.flat = torch.zeros_like(bank.scales)
        self.version = 0
        self.set((0.0,) * len(stack))

    def set(self, strengths: Sequence[float]) -> None:
        """Take over strengths, one for each entry."""
        strengths = tuple(strengths)
        if strengths == self._strengths:
            return
        self._strengths = strengths
        self.version += 1
        values = torch.tensor(strengths, dtype=torch.float64)
        self.flat = (values @ self._factors.double() * self._bank.scales.double()).float()

    def rows(self, layer: BankLayer) -> tuple[int, int]:
        """The rows of a layer that are at work: first, last + 1; equal: none."""
        at_work = [rows for file, rows in layer.rows.items() if self.of(layer, file)]
        if not at_work:
            return 0, 0
        return min(first for first, _ in at_work), max(last for _, last in at_work)

    def of(self, layer: BankLayer, file: int) -> float:
        """The strength of a file, by its number in the bank, in a layer."""
        entries = zip(self._files, self._strengths, self._blocks, strict=True)
        return sum(
            strength * blocks[layer.target.key]
            for number, strength, blocks in entries
            if number == file
        )


def layer_name(key: str, prefix: str) -> str:
    """What a block filter sees of a parameter: the name of its layer, without the prefix."""
    return key.removeprefix(prefix).removesuffix(".weight").removesuffix(".bias")
