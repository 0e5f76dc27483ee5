"""All LoRAs of a stack in two blocks of memory: pairs, and the tensors of other adapters.

The pairs of a layer are joined along their ranks. The delta of several LoRAs is then `up @
diag(amounts) @ down`, so a layer costs two products for all of them, and a change of strength only
changes `amounts` (vllm-omni #6017 joins adapters in the same way). Files are read module by module
into their place.
"""

import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .adapters import Adapter, Pair
from .file import FileEntry, Identity, KeyReport, LoraFile, aligned, identity
from .keys import Target, Targets
from .precision import PROBES, probes

# Ranks are padded with zeros to a multiple of this, for matrix units.
_RANK_STEP = 8


class StoredAdapter(NamedTuple):
    """An adapter that is not a plain pair, of a file number, without the values of its tensors."""

    file: int
    form: Adapter
    at: int  # start of its tensors in the bank's `others`, in bytes


class BankBlock(NamedTuple):
    """A block of the model: its layers, and their place in the bank (first, last + 1)."""

    layers: tuple["BankLayer", ...]
    pairs: tuple[int, int]  # in elements
    others: tuple[int, int]  # in bytes


@dataclass
class BankLayer:
    """The pairs and adapters of one parameter, or of some rows or columns of one."""

    target: Target
    shape: tuple[int, ...]
    rank: int = 0  # of all pairs together
    # By file number: first, last + 1.
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    others: list[StoredAdapter] = field(default_factory=list)
    # Where its parts start in the bank: pairs, rows, tensors of `others`.
    at: int = 0  # in elements
    row: int = 0
    others_at: int = 0  # in bytes
    others_bytes: int = 0  # at most

    @property
    def size(self) -> tuple[int, int]:
        """Outputs and inputs of the layer."""
        return self.shape[0], prod(self.shape[1:])

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

    def adapters(self, others: Tensor, start: int = 0) -> list[Adapter]:
        """Return the other adapters, views of the bytes `others` from place `start`."""
        return [
            form.with_tensors(_views(form.tensors(), others, at - start))
            for _, form, at in self.others
        ]


class Bank(nn.Module):
    """LoRAs for one kind of model."""

    def __init__(
        self, files: Sequence[LoraFile], layers: Sequence[BankLayer], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.files: tuple[Identity, ...] = tuple(file.identity for file in files)
        self.layers = {layer.target: layer for layer in layers}
        at = row = others_at = 0
        for layer in layers:
            layer.at, layer.row, layer.others_at = at, row, others_at
            at, row = at + layer.numel, row + layer.rank
            others_at += layer.others_bytes
        # The pages of new zeros are not allocated until they are written.
        self.flat = _parameter(torch.zeros(at, dtype=dtype))
        self.others = _parameter(torch.zeros(others_at, dtype=torch.uint8))
        self.scales = torch.zeros(row)  # alpha / rank of each row, on the host
        self.reports: list[KeyReport] = [file.report for file in files]
        self.companions: dict[object, object] = {}  # live as long as the bank
        self._overlaps: dict[Target, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.flat.nbytes + self.others.nbytes

    def copy(self) -> "Bank":
        """Return a bank with the same tensors that moves to another device separately."""
        other = Bank((), (), self.flat.dtype)
        other.files, other.layers, other.reports = self.files, self.layers, self.reports
        other.scales, other._overlaps = self.scales, self._overlaps
        other.flat = _parameter(self.flat.detach().cpu())
        other.others = _parameter(self.others.detach().cpu())
        return other

    def blocks(self) -> list[BankBlock]:
        """Return the blocks with something in the bank; layers outside are blocks of their own."""
        blocks: list[BankBlock] = []
        for _, found in groupby(self.layers.values(), lambda layer: block_of(layer.target.key)):
            layers = tuple(found)
            first, last = layers[0], layers[-1]
            pairs = first.at, last.at + last.numel
            others = first.others_at, last.others_at + last.others_bytes
            if pairs[0] < pairs[1] or others[0] < others[1]:
                blocks.append(BankBlock(layers, pairs, others))
        return blocks

    def rms(self, layer: BankLayer, strengths: Mapping[int, float]) -> float:
        """Estimate the root mean square of the delta of a layer's pairs, as `rms_of_pair`."""
        if not layer.rows:
            return 0.0
        if layer.target not in self._overlaps:
            self._overlaps[layer.target] = self._overlaps_of(layer)
        values = torch.tensor([strengths.get(file, 0.0) for file in layer.rows]).double()
        squared = values @ self._overlaps[layer.target] @ values
        return float(squared.clamp(min=0) / prod(layer.size)) ** 0.5

    def _overlaps_of(self, layer: BankLayer) -> Tensor:
        """Return the scalar products of the deltas of the files of a layer, `[files, files]`."""
        down, up = (part.float().cpu() for part in layer.pairs(self.flat.detach()))
        narrow = (down @ probes(down.shape[1])) * self.scales[
            layer.row : layer.row + layer.rank, None
        ]
        deltas = [up[:, slice(*rows)] @ narrow[slice(*rows)] for rows in layer.rows.values()]
        flat = torch.stack(deltas).flatten(1).double()
        return flat @ flat.T / PROBES


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


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
        last = layer.others[-1] if layer.others else None
        at = layer.others_at if last is None else last.at + _stored_bytes(last.form.tensors())
        for view, tensor in zip(
            _views(adapter.tensors(), bank.others.detach(), at), adapter.tensors(), strict=True
        ):
            view.copy_(tensor)
        layer.others.append(StoredAdapter(number, adapter.to("meta"), at))
    else:
        file.report.used -= len(entry.keys)
        file.report.unfit[why] += len(entry.keys)


def _views(forms: Sequence[Tensor], memory: Tensor, at: int) -> Iterator[Tensor]:
    """Yield tensors with the shapes and dtypes of `forms` in a memory of bytes, from `at` on."""
    for form in forms:
        yield memory[at : at + form.nbytes].view(form.dtype).view(form.shape)
        at += aligned(form.nbytes)


def _stored_bytes(forms: Sequence[Tensor]) -> int:
    return sum(aligned(form.nbytes) for form in forms)


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
        else:
            layer.others_bytes += files[number].stored_bytes(entry)
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
