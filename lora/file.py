"""A LoRA file for a model, read one module at a time.

The header has the names and shapes of all parts; data is read when a module is requested, so at
most one or two modules of the file are in memory. The file is read, not memory-mapped: touched
pages of a mapping stay in memory, and touching a page that the file has lost kills the process.
"""

import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import LINE, PICKLE, ZIP, Header, guarded, kind_of, line, read_header, shown
from .deltas import OtherKinds, WeightFunction, make_function, spell
from .keys import Target, Targets, is_of_text_encoder, scales_of, split_key, unsupported_kinds
from .parts import Scales, check_pair, check_values, misfit

# Most lines about pairs that do not fit, which can have any number of shapes.
_MISFITS = 5

# Differences by the parameter that they are of: a weight, a bias, a modulation.
_DIFFERENCES = ("w_norm", "diff_b", "b_norm", "diff_m")


class Identity(NamedTuple):
    """Path, size and time of a file; it changes when the file is replaced."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The keys and shapes that a file has for one parameter of `shape`, by part."""

    target: Target
    shape: tuple[int, ...]
    keys: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def is_pair(self) -> bool:
        """Whether it has a pair, possibly with other parts."""
        return {"up", "down"} <= self.keys.keys()

    @property
    def plain_rank(self) -> int:
        """The rank of a plain pair, which can be joined with others; 0: another kind."""
        plain = self.is_pair and self.keys.keys() <= {"up", "down", "alpha"}
        return self.shapes["down"][0] if plain else 0


@dataclass
class KeyReport:
    """Report on the keys of a file, by the reason why they are not applied."""

    name: str
    used: int = 0
    absent: Counter[str] = field(default_factory=Counter)  # by last name
    unfit: Counter[str] = field(default_factory=Counter)  # by reason
    unsupported: Counter[str] = field(default_factory=Counter)  # by kind
    unknown: list[str] = field(default_factory=list)
    text_encoder: int = 0
    repeated: int = 0  # in another dialect, or of another adapter
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a line for the applied keys, and one for each group of other keys."""
        groups: dict[int, list[str]] = defaultdict(list)
        for leaf, count in self.absent.items():
            groups[count].append(leaf)
        lines = []
        for count, leaves in sorted(groups.items(), reverse=True):
            names = "/".join(map(shown, leaves[:4])) + ("/..." if len(leaves) > 4 else "")
            lines.append(f"{count * len(leaves)} keys for {names}: not in this model")
        misfits = list(self.unfit.items())
        lines += [f"{count} keys do not fit: {why}" for why, count in misfits[:_MISFITS]]
        if rest := sum(count for _, count in misfits[_MISFITS:]):
            lines.append(f"{rest} more keys do not fit")
        kinds = self.unsupported.items()
        lines += [f"{count} keys of an unsupported kind ({kind})" for kind, count in kinds]
        if self.unknown:
            some = ", ".join(map(shown, self.unknown[:3]))
            some += ", ..." if len(self.unknown) > 3 else ""
            lines.append(f"{len(self.unknown)} keys of an unknown form: {some}")
        if self.text_encoder:
            lines.append(f"{self.text_encoder} keys for a text encoder: not applied to a model")
        if self.repeated:
            why = "earlier keys or adapters have their weights"
            lines.append(f"{self.repeated} keys are ignored: {why}")
        first = f"{self.name}: {self.used} keys applied"
        return [first, *(f"  {each}" for each in (*lines, *self.notes))]


class LoraFile:
    """One LoRA file for a model: its `entries` that fit the parameters, and its key `report`.

    `others` makes the kinds that are not made here; None: they are reported as not fitting. A
    ValueError: it is not a complete safetensors file, or nothing in it fits this model.
    """

    def __init__(
        self, path: str | Path, targets: Targets, others: OtherKinds | None = None
    ) -> None:
        self.path, self._others = Path(path), others
        self.identity = identity(self.path)
        self.report = KeyReport(self.path.name)
        self.entries: list[FileEntry] = []
        with _one_line(self.path):
            header = self._header()
            self._start, self._places = header.start, header.places
            self._scales_of = scales_of(header.places)
            self._scales = Scales(header.metadata)
            self._sort(targets)
        if not self.entries:
            raise ValueError(self._no_match(targets))
        self.report.notes += self._notes()

    def read(self, entry: FileEntry) -> WeightFunction | None:
        """Read what one of `entries` does to its weight; None: it does not fit, as reported then.

        A ValueError: it is not valid, or the file was replaced meanwhile.
        """
        with _one_line(self.path):
            parts = {part: self._tensor(key) for part, key in entry.keys.items()}
            where = f"{self.path.name}: {shown(next(iter(entry.keys.values())))}"
            for name, tensor in parts.items():
                check_values(name, tensor, where)
            if parts.keys() & {"up", "down"}:
                check_pair(parts, where)
                self._scales.complete(parts)
            try:
                return make_function(parts, entry.shape, self._others)
            except ValueError as error:
                self.report.used -= len(entry.keys)
                self.report.unfit[str(error)] += len(entry.keys)
                return None

    def _header(self) -> Header:
        """Read the header after checks of the kind of the file."""
        mode = self.path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError("it is a device; expected a .safetensors file")
        with self.path.open("rb") as file:
            if kind_of(file, self.identity.size) in (PICKLE, ZIP):
                why = "is a pickle, which can run code; expected a .safetensors file"
                raise ValueError(f"{self.path.name} {why}")
            return read_header(file, self.identity.size)

    def _tensor(self, key: str) -> Tensor:
        place = self._places[key]
        if (dtype := place.torch_dtype) is None:
            raise ValueError(f"{shown(key)} is {shown(place.dtype)}; expected floating point")
        first, last = place.offsets
        if first == last:
            return torch.empty(place.shape, dtype=dtype)
        data = self._bytes(self._start + first, last - first)
        tensor = torch.frombuffer(data, dtype=dtype).view(place.shape)
        if key not in self._scales_of:
            return tensor
        scale = self._tensor(self._scales_of[key]).float()
        if scale.numel() != 1 and (*scale.shape[:1], scale.numel()) != place.shape[:1] * 2:
            what = f"{shown(key)} is {spell(place.shape)}, its scale {spell(scale.shape)}"
            raise ValueError(f"{what}; expected one number or one per row")
        return tensor.float() * scale.reshape(-1, *[1] * (len(place.shape) - 1))

    def _bytes(self, first: int, count: int) -> bytearray:
        data = bytearray(count)
        with self.path.open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            file.seek(first)
            same = (stat.st_size, stat.st_mtime_ns) == self.identity[1:]
            if same and file.readinto(data) == count:
                return data
        raise ValueError(f"{self.path.name} was replaced while it was read; run again")

    def _sort(self, targets: Targets) -> None:
        found: dict[Target, dict[str, str]] = {}
        kinds, known = unsupported_kinds(self._places), list[tuple[Target, str, str, str]]()
        scales = set(self._scales_of.values())
        for key in (key for key in self._places if key not in scales):
            parsed = split_key(key)
            stem, part, adapter = parsed or (key.rpartition(".")[0], "", "")
            target = targets.find(stem, part) if parsed else None
            if target is None and is_of_text_encoder(key):
                self.report.text_encoder += 1
            elif kind := kinds.get(key) or kinds.get(stem):
                self.report.unsupported[kind] += 1
            elif parsed is None:
                self.report.unknown.append(key)
            elif target is None:
                self.report.absent[_leaf(stem, part)] += 1
            else:
                known.append((target, "diff" if part in _DIFFERENCES else part, adapter, key))
        left_out = _of_other_adapters(known)
        for target, part, adapter, key in known:
            if adapter in left_out or found.setdefault(target, {}).setdefault(part, key) != key:
                self.report.repeated += 1
        for target, keys in found.items():
            self._add(target, keys, targets)

    def _add(self, target: Target, keys: dict[str, str], targets: Targets) -> None:
        # A difference of a weight and another kind for the same weight are both applied.
        alone = {part: key for part, key in keys.items() if part in ("diff", "set_weight")}
        rest = {part: key for part, key in keys.items() if part not in alone}
        for some in (rest, *({part: key} for part, key in alone.items())):
            if not some or set(some) <= {"alpha", "dora_scale"}:
                continue
            shapes = {part: self._places[key].shape for part, key in some.items()}
            entry = FileEntry(target, targets.shape(target), some, shapes)
            why = misfit(shapes, entry.shape)
            if why is None:
                self.entries.append(entry)
                self.report.used += len(some)
            else:
                self.report.unfit[why] += len(some)

    def _notes(self) -> list[str]:
        """Return remarks on what differs from ComfyUI's loader, which users may compare with."""
        pairs = [entry for entry in self.entries if entry.is_pair]
        alpha, notes = self._scales.given_alpha, []
        if self._scales.stabilised and pairs:
            ranks = "alpha / sqrt(rank), in ComfyUI's loader alpha / rank"
            notes.append(f"rank-stabilised by its metadata: {ranks}")
        if alpha is not None and any("alpha" not in each.keys for each in pairs):
            notes.append(f"alpha {alpha:g} by its metadata, in ComfyUI's loader the rank")
        counts = Counter(entry.target for entry in self.entries)
        if both := sum(count > 1 for count in counts.values()):
            what = f"{both} weights have an adapter and a difference"
            notes.append(f"{what}: both are applied, in ComfyUI's loader the difference alone")
        return notes

    def _no_match(self, targets: Targets) -> str:
        if kinds := [*self.report.unsupported]:
            known = "LoRA, LoHa, LoKr, GLoRA, OFT, BOFT or differences"
            return line(self.path.name, f"it is an unsupported kind ({kinds[0]}); expected {known}")
        if self.report.unfit:
            why = next(iter(self.report.unfit))
            return f"{self.path.name} is for another model: {why}"
        theirs = [key for key in self._places if split_key(key)]
        # The keys of a LoRA deserve a long line: they show which model it is for.
        count = 5 if theirs else 2
        keys = ", ".join(map(shown, (theirs or list(self._places))[:count])) or "no keys"
        ours = ", ".join(targets.examples(count)) or "none"
        text = f"nothing in {shown(self.path.name, 60)} is for this model: it has {keys}; "
        text += f"the model has {ours}"
        return text if theirs or len(text) <= LINE else f"{text[: LINE - 3]}..."


def identity(path: str | Path) -> Identity:
    """Return the identity of a file; a `ValueError` if it cannot be read."""
    path = Path(path).absolute()
    with _one_line(path):
        stat = path.stat()
    return Identity(str(path), stat.st_size, stat.st_mtime_ns)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turn every error of a block that reads a file into a `ValueError` of one line."""
    try:
        with guarded(path.name):
            yield
    except OSError as error:
        raise ValueError(line(path.name, f"it cannot be read: {error.strerror}")) from None


def _of_other_adapters(keys: list[tuple[Target, str, str, str]]) -> set[str]:
    """Return the names of adapters that have a weight in common with an earlier one."""
    places: dict[str, set[Target]] = defaultdict(set)
    for target, _, adapter, _ in keys:
        if adapter:
            places[adapter].add(target)
    taken: set[Target] = set()
    left_out: set[str] = set()
    for adapter, targets in places.items():
        if taken.isdisjoint(targets):
            taken |= targets
        else:
            left_out.add(adapter)
    return left_out


def _leaf(stem: str, part: str) -> str:
    """Return the last words of a module's name, by which keys are grouped."""
    if part == "diff_m":
        return "modulation"
    names = [name for name in stem.split(".") if not name.isdigit()]
    leaf = names[-1] if names else stem
    return re.sub(r".*blocks_\d+_(?=.)", "", leaf)
