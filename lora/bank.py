"""All LoRAs of a stack in one block of memory, with the pairs of a layer joined along their ranks.

The delta of several LoRAs is `up @ diag(amounts) @ down`, so a layer costs two products for all of
them, and a change of strength only changes `amounts` (vllm-omni #6017 joins adapters in the same
way). Files are read pair by pair into their place.
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

# Ranks are padded with zeros to a multiple of this, for matrix units.
_RANK_STEP = 8


@dataclass
class BankLayer:
    """The pairs and adapters of one parameter, or of some rows or columns of one.

    Attributes:
        target: The parameter.
        shape: Shape of the target.
        rank: Rank of all pairs together; 0: there are none.
        rows: Rows of the joined pairs by file number: first, last + 1.
        others: Adapters that are not plain pairs, with their file numbers.
        at: Start of the layer's pairs in the bank's memory, in elements.
        row: Start of its rows among those of the bank.
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
        """Outputs and inputs of the layer."""
        return self.shape[0], prod(self.shape[1:])

    @property
    def numel(self) -> int:
        """Elements of the joined pairs."""
        return self.rank * sum(self.size) if self.rank else 0

    def pairs(self, flat: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return the joined pairs, `down` `[rank, in]` and `up` `[out, rank]`.

        Args:
            flat: `[n]`, memory that contains the layer.
            start: Place of `flat` in the bank's memory, in elements.

        Returns:
            Views of `flat`.
        """
        out, inner = self.size
        at = self.at - start
        down = flat[at : at + self.rank * inner].view(self.rank, inner)
        up = flat[at + self.rank * inner : at + self.numel].view(out, self.rank)
        return down, up


class Bank(nn.Module):
    """LoRAs for one kind of model.

    Attributes:
        files: Identities of the files that were read.
        layers: Layers by target, in the order of the model.
        flat: All pairs, one after the other.
        scales: alpha / rank of each row, in float32 on the host.
        reports: The key report of each file.
        companions: Objects that live as long as the bank.
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
        # The pages of new zeros are not allocated until they are written.
        self.flat = nn.Parameter(torch.zeros(at, dtype=dtype), requires_grad=False)
        self.scales = torch.zeros(row)
        self.reports: list[KeyReport] = [file.report for file in files]
        self.companions: dict[object, object] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        others = (adapter.nbytes for layer in self.layers.values() for _, adapter in layer.others)
        return self.flat.numel() * self.flat.element_size() + sum(others)

    def blocks(self) -> list[tuple[int, int]]:
        """Return the place of the pairs of each block of the model: first, last + 1.

        Layers outside blocks are separated by the blocks between them.

        Returns:
            Spans in elements.
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
    """Read a stack of LoRA files, or return the bank of the same files if it is in use.

    Args:
        paths: Different files.
        targets: The parameters of the model.
        dtype: Dtype of the pairs, which are not cast again: use that of the computation.

    Returns:
        The bank, on the host.

    Raises:
        ValueError: A file cannot be used; nothing that was read is kept.
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
    """Return the block of a model that the parameter `key` is in; "": none."""
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
    """Return a sort key that puts block 10 after block 9."""
    words = re.split(r"(\d+)", target.key)
    return tuple(int(word) if word.isdigit() else word for word in words), target.offset or ()
