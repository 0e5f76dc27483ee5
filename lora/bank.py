"""All LoRAs of a stack in one piece of memory, the pairs of a layer joined along their ranks.

A delta of several LoRAs is `up @ diag(amounts) @ down`, whatever their number, so that a layer
costs two products for all of them, and a change of strength is a change of `amounts` alone
(vllm-omni #6017 joins adapters in the same way). Files are read pair by pair into their place.
"""

import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from .adapter import Adapter
from .file import FileEntry, Identity, KeyReport, LoraFile, identity
from .keys import Target, Targets
from .low_rank import Pair

# Ranks grow to a multiple of this, with zeros, for the sake of the matrix units.
_RANK_STEP = 8


@dataclass
class BankLayer:
    """What a bank has for one parameter, or for some rows or columns of one.

    Attributes:
        target: The parameter.
        shape: Of what is meant of it.
        rank: Of all pairs together; 0: there are none.
        rows: Of the joined pairs, by the number of the file that they are from: first, last + 1.
        others: Adapters that are no plain pairs, with the numbers of their files.
        at: Where the layer's pairs begin in the bank's memory, in numbers.
        row: Where its rows begin among those of the bank.
    """

    target: Target
    shape: tuple[int, ...]
    rank: int = 0
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    others: list[tuple[int, Adapter]] = field(default_factory=list)
    at: int = 0
    row: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """Numbers that leave the layer and that enter it."""
        return self.shape[0], prod(self.shape[1:])

    @property
    def numel(self) -> int:
        """Of the joined pairs."""
        return self.rank * sum(self.size) if self.rank else 0

    def pairs(self, flat: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """The joined pairs, `down [rank, in]` and `up [out, rank]`, in memory that has the layer.

        It begins at the number `start` of the bank's memory.
        """
        out, inner = self.size
        at = self.at - start
        down = flat[at : at + self.rank * inner].view(self.rank, inner)
        up = flat[at + self.rank * inner : at + self.numel].view(out, self.rank)
        return down, up


class Bank(nn.Module):
    """LoRAs that belong to one kind of model.

    Attributes:
        files: Identities of those that it was read from.
        layers: By their target, in the order of the model.
        flat: All pairs, one after the other.
        scales: The factor of each row, alpha / rank, in float32 on the host.
        reports: What became of the keys of each file.
        companions: What is to live as long as the bank.
    """

    def __init__(
        self, files: Sequence[LoraFile], layers: Sequence[BankLayer], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.files: tuple[Identity, ...] = tuple(file.identity for file in files)
        self.layers = {layer.target: layer for layer in layers}
        at = row = 0
        for layer in layers:
            layer.at, layer.row = at, row
            at, row = at + layer.numel, row + layer.rank
        # Zeros are pages that nobody has touched yet.
        self.flat = nn.Parameter(torch.zeros(at, dtype=dtype), requires_grad=False)
        self.scales = torch.zeros(row)
        self.reports: list[KeyReport] = [file.report for file in files]
        self.companions: dict[object, object] = {}

    @property
    def nbytes(self) -> int:
        """Of all that was read."""
        others = (adapter.nbytes for layer in self.layers.values() for _, adapter in layer.others)
        return self.flat.numel() * self.flat.element_size() + sum(others)

    def blocks(self) -> list[tuple[int, int]]:
        """Where the pairs of each block of the model lie: first, last + 1.

        What is in no block is divided by the blocks between.
        """
        spans: list[tuple[int, int]] = []
        at_last = None
        for layer in self.layers.values():
            name = block_of(layer.target.key)
            start = spans.pop()[0] if name == at_last else layer.at
            spans.append((start, layer.at + layer.numel))
            at_last = name
        return [span for span in spans if span[0] < span[1]]


_banks: weakref.WeakValueDictionary[tuple, Bank] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def load_bank(
    paths: Sequence[str | Path], targets: Targets, dtype: torch.dtype = torch.float32
) -> Bank:
    """Read a stack of LoRA files, or return the bank of the same files that is still in use.

    The files are different ones. The bank is on the host; `dtype` is that of its pairs, which are
    not cast again: use the dtype of the computation.

    Raises:
        ValueError: A file cannot be used; nothing is kept of what was read.
    """
    with _lock:
        key = tuple(identity(path) for path in paths), dtype, targets.fingerprint
        bank = _banks.get(key)
        if bank is None:
            files = [LoraFile(path, targets) for path in paths]
            bank = Bank(files, _layers(files, targets), dtype)
            for number, entry in _entries(files):
                _place(bank, number, files[number], entry)
            _banks[bank.files, dtype, targets.fingerprint] = bank
        return bank


def block_of(key: str) -> str:
    """The block of a model that a parameter is in; "": none."""
    match = re.search(r"(?:^|\.)(\w*(?:blocks|layers)\.\d+)\.", key)
    return match[1] if match else ""


def _place(bank: Bank, number: int, file: LoraFile, entry: FileEntry) -> None:
    adapter = file.read(entry)
    layer = bank.layers[entry.target]
    if isinstance(adapter, Pair) and number in layer.rows:
        first, last = layer.rows[number]
        down, up = layer.pairs(bank.flat)
        down[first:last] = adapter.down.flatten(1)
        up[:, first:last] = adapter.up.flatten(1)
        bank.scales[layer.row + first : layer.row + last] = adapter.scale
    elif (why := adapter.misfit(layer.shape)) is None:
        layer.others.append((number, adapter))
    else:
        file.report.used -= len(entry.keys)
        file.report.unfit[why] += len(entry.keys)


def _layers(files: Sequence[LoraFile], targets: Targets) -> list[BankLayer]:
    layers: dict[Target, BankLayer] = {}
    for number, entry in _entries(files):
        layer = layers.setdefault(
            entry.target, BankLayer(entry.target, targets.shape(entry.target))
        )
        rank = entry.plain_rank
        if rank and len(layer.shape) > 1:
            layer.rows[number] = layer.rank, layer.rank + rank
            layer.rank += rank
    for layer in layers.values():
        layer.rank = -(-layer.rank // _RANK_STEP) * _RANK_STEP
    return sorted(layers.values(), key=lambda layer: _natural(layer.target))


def _entries(files: Sequence[LoraFile]) -> Iterator[tuple[int, FileEntry]]:
    for number, file in enumerate(files):
        for entry in file.entries:
            yield number, entry


def _natural(target: Target) -> tuple:
    """Such that block 10 comes after block 9."""
    words = re.split(r"(\d+)", target.key)
    return tuple(int(word) if word.isdigit() else word for word in words), target.offset or ()
