"""A LoRA file for a model, read one module at a time.

The header has the names and shapes of all parts; data is read when a module is requested, so at
most one or two modules of the file are in memory. The file is read, not memory-mapped: touched
pages of a mapping stay in memory, and touching a page that the file has lost kills the process.
"""

import json
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import LINE, PICKLE, ZIP, Header, guarded, kind_of, line, read_header, shown
from .adapters import Adapter, make_adapter, spell
from .key_report import KeyReport
from .keys import Target, Targets, is_of_text_encoder, scales_of, split_key, unsupported_kinds

# GPUs read 16 bytes at once.
_ALIGNMENT = 16

# Parts that are differences of another parameter.
_DIFFERENCES = ("diff_b", "b_norm", "diff_m")


class Identity(NamedTuple):
    """Path, size and time of a file; it changes when the file is replaced."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The keys and shapes that a file has for one parameter, by part."""

    target: Target
    keys: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def plain_rank(self) -> int:
        """The rank of a plain pair, which can be joined with others; 0: another kind of adapter."""
        if not {"up", "down"} <= self.keys.keys() <= {"up", "down", "alpha"}:
            return 0
        return self.shapes["down"][0]


class LoraFile:
    """One LoRA file for a model.

    Attributes:
        entries: Entries that fit the model.
        report: The key report.

    Raises:
        ValueError: It is not a complete safetensors file, or nothing in it fits this model.
    """

    def __init__(self, path: str | Path, targets: Targets) -> None:
        self.path = Path(path)
        self.identity = identity(self.path)
        self.report = KeyReport(self.path.name)
        self.entries: list[FileEntry] = []
        with guarded(self.path.name):
            header = self._header()
            self._start, self._places = header.start, header.places
            self._scales_of = scales_of(header.places)
            self._scales = _Scales(header.metadata)
            self._sort(targets)
        if not self.entries:
            raise ValueError(self._no_match(targets))
        self.report.notes += self._notes()

    def read(self, entry: FileEntry) -> Adapter:
        """Read the adapter of one parameter.

        Args:
            entry: One of `entries`.

        Returns:
            The adapter.

        Raises:
            ValueError: It is not valid, or the file was replaced meanwhile.
        """
        with guarded(self.path.name):
            parts = {part: self._tensor(key) for part, key in entry.keys.items()}
            where = f"{self.path.name}: {shown(next(iter(entry.keys.values())))}"
            paired = {"up", "down"} <= parts.keys()
            if paired and "alpha" not in parts:
                alpha = self._scales.alpha(entry.shapes["down"][0])
                if alpha is not None:
                    parts["alpha"] = torch.tensor(alpha)
            elif "alpha" in parts and self._scales.stabilised and "down" in parts:
                parts["alpha"] = parts["alpha"].float() * entry.shapes["down"][0] ** 0.5
            return make_adapter(parts, where)

    def stored_bytes(self, entry: FileEntry) -> int:
        """Return the bytes that an adapter needs at most, with alignment."""
        places = {key: self._places[key] for key in entry.keys.values()}
        sizes = {key: place.offsets[1] - place.offsets[0] for key, place in places.items()}
        # A scaled matrix is read as float32.
        sizes |= {key: 4 * prod(places[key].shape) for key in places if key in self._scales_of}
        return sum(map(aligned, sizes.values()))

    def _header(self) -> Header:
        """Read the header after checks of the kind of the file."""
        try:
            mode = self.path.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise ValueError("it is a device; expected a .safetensors file")
            with self.path.open("rb") as file:
                kind = kind_of(file, self.identity.size)
                if kind in (PICKLE, ZIP):
                    why = "is a pickle, which can run code; expected a .safetensors file"
                    raise ValueError(f"{self.path.name} {why}")
                return read_header(file, self.identity.size)
        except OSError as error:
            raise ValueError(f"{self.path.name} cannot be read: {error.strerror}") from None

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
        try:
            with self.path.open("rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                file.seek(first)
                same = (stat.st_size, stat.st_mtime_ns) == self.identity[1:]
                if same and file.readinto(data) == count:
                    return data
        except OSError as error:
            raise ValueError(f"{self.path.name} cannot be read: {error.strerror}") from None
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
        # A difference of a weight and an adapter of the same weight are both applied.
        alone = {
            part: key for part, key in keys.items() if part in ("diff", "w_norm", "set_weight")
        }
        rest = {part: key for part, key in keys.items() if part not in alone}
        for some in (rest, *({part: key} for part, key in alone.items())):
            if not some or set(some) <= {"alpha", "dora_scale"}:
                continue
            shapes = {part: self._places[key].shape for part, key in some.items()}
            entry = FileEntry(target, some, shapes)
            why = _check_shapes(entry, targets.shape(target))
            if why is None:
                self.entries.append(entry)
                self.report.used += len(some)
            else:
                self.report.unfit[why] += len(some)

    def _notes(self) -> list[str]:
        """Return remarks on what differs from ComfyUI's loader, which users may compare with."""
        notes = []
        pairs = [entry for entry in self.entries if {"up", "down"} <= entry.keys.keys()]
        if self._scales.stabilised and pairs:
            notes.append(
                "rank-stabilised by its metadata: alpha / sqrt(rank), in ComfyUI's loader alpha / "
                "rank"
            )
        if self._scales.given_alpha is not None and any("alpha" not in each.keys for each in pairs):
            notes.append(
                f"alpha {self._scales.given_alpha:g} by its metadata, in ComfyUI's loader the rank"
            )
        counts = Counter(entry.target for entry in self.entries)
        if both := sum(count > 1 for count in counts.values()):
            notes.append(
                f"{both} weights have an adapter and a difference: both are applied, in ComfyUI's "
                "loader the difference alone"
            )
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


def aligned(count: int) -> int:
    """Return `count` bytes, rounded up to a place where a tensor of any dtype can start."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def identity(path: str | Path) -> Identity:
    """Return the path, size and modification time of a file.

    Args:
        path: The file.

    Returns:
        Its identity, which changes when the file is replaced.

    Raises:
        ValueError: The file cannot be read.
    """
    path = Path(path).absolute()
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(line(path.name, f"cannot be read: {error.strerror}")) from None
    return Identity(str(path), stat.st_size, stat.st_mtime_ns)


def _check_shapes(entry: FileEntry, shape: tuple[int, ...]) -> str | None:
    """Return why an entry does not fit its parameter; None: no reason is known yet."""
    if "diff" in entry.shapes:
        size = entry.shapes["diff"]
        if prod(size) == prod(shape):
            return None
        return f"a difference of {spell(size)} for a parameter of {spell(shape)}"
    if not {"up", "down"} <= entry.shapes.keys() or {"mid", "reshape_weight"} & entry.shapes.keys():
        return None  # checked when it is read
    up, down = entry.shapes["up"], entry.shapes["down"]
    if not up or not down:
        return f"a pair of {spell(up)} and {spell(down)}"
    size = up[0], prod(down[1:])
    if len(shape) > 1 and size == (shape[0], prod(shape[1:])):
        return None
    return f"a pair for {spell(size)} and a parameter of {spell(shape)}"


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


class _Scales:
    """Scales in the metadata of a file: PEFT's configuration, as diffusers writes it."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        known: dict[str, object] = dict(metadata)
        for name in ("lora_adapter_metadata", "adapter_config", "peft_config", "ss_network_args"):
            try:
                value = json.loads(metadata.get(name, "{}"), parse_int=_whole)
            except (ValueError, RecursionError):
                value = {}
            if isinstance(value, dict):
                known |= {str(key).rpartition(".")[2]: each for key, each in value.items()}
        self.stabilised = str(known.get("use_rslora", "")).lower() in ("true", "1")
        self.given_alpha = _number(known.get("lora_alpha"))

    def alpha(self, rank: int) -> float | None:
        """Return the alpha of a pair of `rank` without an alpha key; the scale is alpha / rank."""
        if self.given_alpha is None:
            return None
        return self.given_alpha * (rank**0.5 if self.stabilised else 1.0)


def _whole(digits: str) -> int | float:
    """Parse an integer; a long one becomes a float: Python takes minutes for a million digits."""
    return int(digits) if len(digits) < 20 else float(digits)


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
