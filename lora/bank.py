"""All LoRAs of a stack: the pairs in one block of memory, and the tensors of all other functions.

The pairs of a layer are joined along their ranks. The delta of several LoRAs is then `up @
diag(amounts) @ down`, so a layer costs two products for all of them, and a change of strength only
changes `amounts` (vllm-omni #6017 joins adapters in the same way). Files are read module by module
into their place.
"""

import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .adapters import OtherKinds, Pair, WeightFunction, as_matrix
from .file import FileEntry, Identity, KeyReport, LoraFile, identity
from .keys import Target, Targets
from .precision import rms_of_pair

# Ranks are padded with zeros to a multiple of this, for matrix units.
_RANK_STEP = 8


class StoredFunction(NamedTuple):
    """A function of the weight, of a file number, without its tensors."""

    file: int
    form: WeightFunction
    names: tuple[str, ...]  # of its tensors in the bank


class BankBlock(NamedTuple):
    """A block of the model: its layers, and the place of their pairs (first, last + 1)."""

    layers: tuple["BankLayer", ...]
    pairs: tuple[int, int]


@dataclass
class BankLayer:
    """The pairs and functions of one parameter, or of some rows or columns of one."""

    target: Target
    shape: tuple[int, ...]
    rank: int = 0  # of all pairs together
    # By file number: first, last + 1.
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    sizes: dict[int, float] = field(default_factory=dict)  # root mean squares, for 16 bits
    others: list[StoredFunction] = field(default_factory=list)
    # Where its parts start in the bank: pairs, rows.
    at: int = 0
    row: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """Outputs and inputs of the layer."""
        return as_matrix(self.shape)

    @property
    def numel(self) -> int:
        """Elements of the joined pairs."""
        return self.rank * sum(self.size) if self.rank else 0

    def pairs(self, flat: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return `down` `[rank, in]` and `up` `[out, rank]`, views of `flat` from place `start`."""
        out, inner = self.size
        at = self.at - start
        down = flat[at : at + self.rank * inner].view(self.rank, inner)
        up = flat[at + self.rank * inner : at + self.numel].view(out, self.rank)
        return down, up


class Bank(nn.Module):
    """LoRAs for one kind of model."""

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
        self.flat = _parameter(torch.zeros(at, dtype=dtype))
        self.scales = torch.zeros(row)  # alpha / rank of each row, on the host
        self.reports: list[KeyReport] = [file.report for file in files]
        self.companions: dict[object, object] = {}  # live as long as the bank

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.parameters())

    @property
    def place(self) -> tuple[object, ...]:
        """Where its memory is; it changes when the bank moves."""
        last = self.get_parameter(next(reversed(self._parameters)))
        return tuple((each.device, each.data_ptr()) for each in (self.flat, last))

    def copy(self) -> "Bank":
        """Return a bank with the same tensors that moves to another device separately."""
        other = Bank((), (), self.flat.dtype)
        other.files, other.layers, other.reports = self.files, self.layers, self.reports
        other.scales = self.scales
        for name, value in self.named_parameters():
            other.register_parameter(name, _parameter(value.detach().cpu()))
        return other

    def store(self, layer: BankLayer, file: int, function: WeightFunction) -> None:
        """Add a function of the weight of `layer`, from a file number."""
        # Parameters of this module: ComfyUI moves nothing of a module with submodules.
        first = len(self._parameters)
        names = tuple(f"other_{first + number}" for number in range(len(function.tensors)))
        for name, tensor in zip(names, function.tensors, strict=True):
            self.register_parameter(name, _parameter(tensor))
        layer.others.append(StoredFunction(file, function.with_tensors(()), names))

    def functions(self, layer: BankLayer) -> list[WeightFunction]:
        """Return the functions of `layer` with their tensors."""
        return [
            form.with_tensors([self.get_parameter(name).detach() for name in names])
            for _, form, names in layer.others
        ]

    def blocks(self) -> list[BankBlock]:
        """Return the blocks with pairs in the bank; layers outside are blocks of their own."""
        blocks: list[BankBlock] = []
        for _, found in groupby(self.layers.values(), lambda layer: block_of(layer.target.key)):
            layers = tuple(found)
            first, last = layers[0], layers[-1]
            if first.at < (end := last.at + last.numel):
                blocks.append(BankBlock(layers, (first.at, end)))
        return blocks


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


_banks: weakref.WeakValueDictionary[tuple, Bank] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def load_bank(
    paths: Sequence[str | Path],
    targets: Targets,
    dtype: torch.dtype = torch.float32,
    others: OtherKinds | None = None,
) -> Bank:
    """Read a stack of LoRA files, or return the bank of the same files if it is in use.

    Args:
        paths: Different files.
        targets: The parameters of the model.
        dtype: Dtype of the pairs, which are not cast again: use that of the computation.
        others: As in `LoraFile`.

    Returns:
        The bank, on the host.

    Raises:
        ValueError: A file cannot be used; nothing that was read is kept.
    """
    with _lock:
        key = tuple(identity(path) for path in paths), dtype, targets.fingerprint
        bank = _banks.get(key)
        if bank is None:
            files = [LoraFile(path, targets, others) for path in paths]
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
    function = file.read(entry)
    layer = bank.layers[entry.target]
    if function is None:
        return
    if isinstance(function, Pair):
        first, last = layer.rows[number]
        down, up = layer.pairs(bank.flat)
        down, up = down[first:last], up[:, first:last]
        down.copy_(function.down)
        up.copy_(function.up)
        bank.scales[layer.row + first : layer.row + last] = function.scale
        if bank.flat.dtype.itemsize == 2:
            layer.sizes[number] = abs(function.scale) * rms_of_pair(down, up)
        return
    bank.store(layer, number, function)


def _layers(files: Sequence[LoraFile], targets: Targets) -> list[BankLayer]:
    layers: dict[Target, BankLayer] = {}
    for number, entry in _entries(files):
        layer = layers.setdefault(
            entry.target, BankLayer(entry.target, targets.shape(entry.target))
        )
        if rank := entry.plain_rank:
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
