"""The strengths and block filters of a stack as one vector for a bank."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .bank import Bank, BankLayer
from .blocks import Blocks
from .keys import NETWORK
from .schedule import Schedule


@dataclass(frozen=True)
class StackEntry:
    """One LoRA of a stack."""

    path: str | Path
    schedule: Schedule
    blocks: Blocks


class Amounts:
    """The factors of all rows of a bank, for the current strengths of a stack.

    Args:
        bank: A bank with the files of all entries.
        stack: The entries.

    Attributes:
        flat: `[rows]` in float32: alpha / rank, times strength, times the factor of the block.
        version: Increases with every change.
    """

    def __init__(self, bank: Bank, stack: Sequence[StackEntry]) -> None:
        self._bank = bank
        numbers = {file.path: number for number, file in enumerate(bank.files)}
        self._files = [numbers[str(Path(entry.path).absolute())] for entry in stack]
        self._factors = torch.zeros(len(stack), bank.scales.numel())
        self._blocks: list[dict[str, float]] = []
        for row, file, entry in zip(self._factors, self._files, stack, strict=True):
            blocks: dict[str, float] = {}
            for layer in bank.layers.values():
                name = layer_name(layer.target.key)
                factor = blocks[layer.target.key] = entry.blocks.factor(name)
                if file in layer.rows:
                    first, last = layer.rows[file]
                    row[layer.row + first : layer.row + last] = factor
            self._blocks.append(blocks)
        self._lock = threading.Lock()  # a model on several GPUs has a thread for each
        self._strengths: tuple[float, ...] = ()
        self.flat = torch.zeros_like(bank.scales)
        self.version = 0
        self.set((0.0,) * len(stack))

    def set(self, strengths: Sequence[float]) -> None:
        """Set `strengths`, one per entry."""
        strengths = tuple(strengths)
        with self._lock:
            if strengths == self._strengths:
                return
            self._strengths = strengths
            values = torch.tensor(strengths, dtype=torch.float64)
            self.flat = (values @ self._factors.double() * self._bank.scales.double()).float()
            self.version += 1

    def rows(self, layer: BankLayer) -> tuple[int, int]:
        """Return the active rows of `layer`: first, last + 1; equal: none."""
        at_work = [rows for file, rows in layer.rows.items() if self.of(layer, file)]
        if not at_work:
            return 0, 0
        return min(first for first, _ in at_work), max(last for _, last in at_work)

    def of(self, layer: BankLayer, file: int) -> float:
        """Return the strength of `file`, a file number of the bank, in `layer`."""
        entries = zip(self._files, self._strengths, self._blocks, strict=True)
        return sum(
            strength * blocks[layer.target.key]
            for number, strength, blocks in entries
            if number == file
        )

    def rms(self, layer: BankLayer) -> float:
        """Return the root mean square of the delta of the pairs of `layer`, as if independent."""
        return sum((self.of(layer, file) * size) ** 2 for file, size in layer.sizes.items()) ** 0.5


def layer_name(key: str) -> str:
    """Return the layer's name of a parameter `key`, for block filters."""
    return key.removeprefix(NETWORK).removesuffix(".weight").removesuffix(".bias")
