"""All LoRAs of a stack: the pairs in one block of memory, and the tensors of all other functions.

The pairs of a layer are joined along their ranks. The delta of several LoRAs is then `up @
diag(amounts) @ down`, so a layer costs two products for all of them, and a change of strength only
changes `amounts` (vllm-omni #6017 joins adapters in the same way). Files are read module by module
into their place.
"""

import contextlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .blocks import Blocks
from .deltas import OtherKinds, Pair, WeightFunction, as_matrix
from .file import FileEntry, Identity, KeyReport, LoraFile, identity
from .keys import NETWORK, Target, Targets
from .precision import rms_of_pair
from .schedule import Schedule

# Ranks are padded with zeros to a multiple of this, for matrix units.
_RANK_STEP = 8


class StoredFunction(NamedTuple):
    """A function of the weight, of a file number, without its tensors."""

    file: int
    form: WeightFunction
    names: tuple[str, ...]  # of its tensors in the bank


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
    def numel(self) -> int:
        """Elements of the joined pairs."""
        return self.rank * sum(as_matrix(self.shape)) if self.rank else 0

    def pairs(self, flat: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `down` `[rank, in]` and `up` `[out, rank]`, views of a bank's `flat` or copies."""
        down = self.rank * as_matrix(self.shape)[1]
        own = flat[self.at : self.at + self.numel].to(device, non_blocking=device.type == "cuda")
        return own[:down].view(self.rank, -1), own[down:].view(-1, self.rank)


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

    def pin(self) -> None:
        """Pin what is on the host, in place, so that copies to a GPU do not wait."""
        for value in self.parameters() if torch.cuda.is_available() else ():
            if value.device.type == "cpu" and not value.is_pinned():
                with contextlib.suppress(RuntimeError):
                    value.data = value.data.pin_memory()

    def store(self, layer: BankLayer, file: int, function: WeightFunction) -> None:
        """Add a function of the weight of `layer`, from a file number."""
        # Parameters of this module: ComfyUI moves nothing of a module with submodules.
        first = len(self._parameters)
        names = tuple(f"other_{first + number}" for number in range(len(function.tensors)))
        for name, tensor in zip(names, function.tensors, strict=True):
            self.register_parameter(name, _parameter(tensor))
        layer.others.append(StoredFunction(file, function.with_tensors(()), names))

    def functions(self, layer: BankLayer) -> list[tuple[int, WeightFunction]]:
        """Return the file number of each function of `layer`, and the function."""
        return [
            (file, form.with_tensors([self.get_parameter(name).detach() for name in names]))
            for file, form, names in layer.others
        ]


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

    The paths differ. The pairs get `dtype` and are not cast again: use that of the computation.
    `others` is that of `LoraFile`. A ValueError: a file cannot be used, and nothing is kept.
    """
    with _lock:
        key = tuple(identity(path) for path in paths), dtype, targets.fingerprint
        bank = _banks.get(key)
        if bank is None:
            files = [LoraFile(path, targets, others) for path in paths]
            bank = Bank(files, _layers(files, targets), dtype)
            for number, file in enumerate(files):
                for entry in file.entries:
                    _place(bank, number, file, entry)
            _banks[bank.files, dtype, targets.fingerprint] = bank
        return bank


def _place(bank: Bank, number: int, file: LoraFile, entry: FileEntry) -> None:
    function, layer = file.read(entry), bank.layers[entry.target]
    if isinstance(function, Pair):
        first, last = layer.rows[number]
        down, up = layer.pairs(bank.flat, bank.flat.device)
        down, up = down[first:last], up[:, first:last]
        down.copy_(function.tensors[0])
        up.copy_(function.tensors[1])
        bank.scales[layer.row + first : layer.row + last] = function.scale
        if bank.flat.dtype.itemsize == 2:
            layer.sizes[number] = abs(function.scale) * rms_of_pair(down, up)
    elif function is not None:
        bank.store(layer, number, function)


def _layers(files: Sequence[LoraFile], targets: Targets) -> list[BankLayer]:
    layers: dict[Target, BankLayer] = {}
    for number, file in enumerate(files):
        for entry in file.entries:
            made = BankLayer(entry.target, targets.shape(entry.target))
            layer = layers.setdefault(entry.target, made)
            if rank := entry.plain_rank:
                layer.rows[number] = layer.rank, layer.rank + rank
                layer.rank += rank
    for layer in layers.values():
        layer.rank = -(-layer.rank // _RANK_STEP) * _RANK_STEP
    return [*layers.values()]


@dataclass(frozen=True)
class StackEntry:
    """One LoRA of a stack."""

    path: str | Path
    schedule: Schedule
    blocks: Blocks


class Amounts:
    """The factors of all rows of a bank of the files of a stack, for its current strengths.

    Attributes:
        flat: `[rows]` in float32: alpha / rank, times strength, times the factor of the block.
        version: Increases with every change.
    """

    def __init__(self, bank: Bank, stack: Sequence[StackEntry]) -> None:
        self._bank = bank
        numbers = {file.path: number for number, file in enumerate(bank.files)}
        self._files = [numbers[str(Path(entry.path).absolute())] for entry in stack]
        self._factors = torch.zeros(len(stack), bank.scales.numel())
        keys = {layer.target.key for layer in bank.layers.values()}
        self._blocks = [
            {key: entry.blocks.factor(layer_name(key)) for key in keys} for entry in stack
        ]
        entries = zip(self._factors, self._files, self._blocks, strict=True)
        for factors, file, blocks in entries:
            for layer in bank.layers.values():
                first, last = layer.rows.get(file, (0, 0))
                factors[layer.row + first : layer.row + last] = blocks[layer.target.key]
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
