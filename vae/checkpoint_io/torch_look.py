"""A look at a PyTorch file before `torch.load` reads it: what it would call, and how much memory.

`torch.load(weights_only=True)` calls functions for tensors only, but with any arguments: a pickle
of 30 bytes can take a gigabyte (`bytearray(10**9)`) or overflow the stack (nested tuples). Here its
instructions are followed with names, numbers and texts alone; nothing is called or allocated.

Source of the layout: torch/serialization.py and torch/_weights_only_unpickler.py of PyTorch 2.13.
"""

import io
import struct
from math import prod
from pickletools import genops
from typing import BinaryIO, NamedTuple, TypeGuard
from zipfile import BadZipFile, ZipFile

import torch

from ...kernels import shown

# A tensor takes about 40 instructions and 170 bytes, a member of an archive 120 bytes.
_MAX_INSTRUCTIONS = 300_000
_MAX_BYTES = 16 << 20
_MAX_DIRECTORY = 4 << 20
_MAX_DEPTH = 100

# Limits of keys: long texts are slow to compare, large numbers can have equal hashes.
_MAX_TEXT, _MAX_NUMBER = 1000, 1 << 32

_MAGIC = 0x1950A86A20F9469CFC6C

_STORAGES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1,
    "Byte": 1, "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
# Bytes of an element by type of storage.
_ITEM_BYTES = {
    f"{module}.{name}Storage": count
    for name, count in _STORAGES.items()
    for module in ("torch", "torch.cuda")
} | {"torch.storage.UntypedStorage": 1}
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}

# Functions that create a tensor from data in the file, and those that wrap their first argument.
_TENSORS = {f"torch._utils._rebuild_tensor{end}" for end in ("", "_v2", "_v3")}
_WRAPPERS = {
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch.nn.parameter.Parameter",
}
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"

# Functions that create other tensors, which are refused.
_OTHER_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor, without numbers",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of a type of its own",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of another device",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of another device",
}
_ORDERED = "collections.OrderedDict"
_BYTE_ARRAYS = {"builtins.bytearray", "__builtin__.bytearray"}
# What training saves next to weights.
_OTHER_CALLS = {
    _ORDERED, "collections.Counter", "torch.Size", "torch.device", "_codecs.encode",
    "torch.serialization._get_layout", *_BYTE_ARRAYS,
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "complex")),
}  # fmt: skip
_CALLS = {*_TENSORS, *_WRAPPERS, _FROM_TYPE, *_OTHER_TENSORS, *_OTHER_CALLS}
_NAMES = {*_CALLS, *_ITEM_BYTES, *_DTYPES, "torch.Tensor"}

# Instructions that PyTorch reads. Those that join objects: how many; None: all from the mark on.
_LITERALS = {
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINSTRING",
}  # fmt: skip
_JOINS = {
    "TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "APPENDS": None,
    "SETITEM": 2, "SETITEMS": None, "REDUCE": 2, "NEWOBJ": 2, "BUILD": 1, "BINPERSID": 1,
}  # fmt: skip


class _Seen(NamedTuple):
    """What is known of an object: a literal, a tuple, a list, or the name of a global or call."""

    value: object
    depth: int = 0


class _Stored(NamedTuple):
    """The data of a storage in the file."""

    nbytes: int
    item_bytes: int


class _Odd(NamedTuple):
    """A tensor that is refused, and why."""

    why: str


def check_zip(file: BinaryIO, size: int) -> None:
    """Refuse a `.pth` file since PyTorch 1.6, of `size` bytes, unless it is a plain state dict."""
    directory = "the directory of its zip archive is damaged"
    file.seek(max(0, size - 98))
    tail = file.read().rjust(98)
    # PyTorch and zipfile look for the directory in different ways; for this form they agree.
    wide = tail[56:60] == b"PK\x06\x07"
    count, first = struct.unpack("<QQ" if wide else "<II", tail[40:56] if wide else tail[88:96])
    if tail[76:80] != b"PK\x05\x06":
        raise ValueError("it is a truncated zip archive")
    if first + count != size - (98 if wide else 22) or count > _MAX_DIRECTORY:
        raise ValueError(directory)
    if wide and int.from_bytes(tail[64:72], "little") != size - 98:
        raise ValueError(directory)
    try:
        members = ZipFile(file).infolist()
    except (BadZipFile, NotImplementedError, ValueError, struct.error):
        raise ValueError(directory) from None
    sizes = {each.filename: each.file_size for each in members}
    root = members[0].filename.partition("/")[0] if members else ""
    pickle = next((each for each in members if each.filename == f"{root}/data.pkl"), None)
    if pickle is None:
        raise ValueError("it is a zip archive without a PyTorch state dict")
    if f"{root}/constants.pkl" in sizes:
        raise ValueError("it is a TorchScript program; expected a state dict")
    if len({name.lower() for name in sizes}) < len(members):
        raise ValueError("two members of its zip archive have one name")
    for each in members:
        name = f"its member {shown(each.filename)}"
        if each.compress_type or each.flag_bits & 1 or each.file_size != each.compress_size:
            raise ValueError(f"{name} is compressed or encrypted; expected it stored")
        if each.header_offset + each.file_size > first:
            raise ValueError(f"{name} is incomplete: {each.file_size} bytes")
    file.seek(pickle.header_offset + 26)
    file.seek(sum(struct.unpack("<HH", file.read(4))), io.SEEK_CUR)
    if pickle.file_size > _MAX_BYTES:
        raise ValueError("its pickle is too large")
    _, storages = _followed(io.BytesIO(file.read(pickle.file_size)))
    for key, nbytes in storages.items():
        found = sizes.get(f"{root}/data/{key}", -1)
        if found < nbytes:
            what = "is not in the file" if found < 0 else f"has {found} bytes; expected {nbytes}"
            raise ValueError(f"its storage {shown(key)} {what}")


def check_pickles(file: BinaryIO, size: int) -> None:
    """Refuse a file from before PyTorch 1.6, of `size` bytes, unless it is a plain state dict."""
    file.seek(0)
    pickles = io.BytesIO(file.read(_MAX_BYTES))
    if _MAGIC.to_bytes(10, "little") not in pickles.getbuffer()[:32].tobytes():
        raise ValueError("it is a pickle, but not of PyTorch; expected a state dict")
    for _ in ("magic number", "version", "system"):
        _followed(pickles)
    _, storages = _followed(pickles)
    keys, _ = _followed(pickles)
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise ValueError(f"it does not list the {len(storages)} storages that it uses")
    # The number of its elements precedes each storage.
    end = pickles.tell() + sum(nbytes + 8 for nbytes in storages.values())
    if end > size:
        raise ValueError(f"its storages need {end} bytes; the file has {size}")


def _followed(file: BinaryIO) -> tuple[object, dict[str, int]]:
    """Follow one pickle; return its value and the bytes of each storage by key."""
    looking = _Look()
    try:
        for count, (instruction, argument, _) in enumerate(genops(file)):
            if count > _MAX_INSTRUCTIONS:
                raise _LookError(f"its pickle has more than {_MAX_INSTRUCTIONS} instructions")
            looking.step(instruction.name, argument)
        return looking.result(), looking.storages
    except _LookError:
        raise
    except (ValueError, LookupError, TypeError):
        raise ValueError("its pickle is damaged or too large") from None


class _LookError(ValueError):
    """A reason to refuse a file."""


class _Look:
    """The stack of a pickle, with what is known of the objects on it."""

    def __init__(self) -> None:
        self.storages: dict[str, int] = {}
        self._stack: list[_Seen] = []
        self._marks: list[int] = []
        self._memo: dict[object, _Seen] = {}
        self._odd: _Odd | None = None

    def result(self) -> object:
        if self._odd is not None:
            raise _LookError(f"one of its tensors {self._odd.why}")
        return self._stack.pop().value

    def step(self, name: str, argument: object) -> None:
        if name in _LITERALS:
            self._stack.append(_Seen(argument))
        elif name == "GLOBAL":
            full = str(argument).replace(" ", ".", 1)
            if full not in _NAMES:
                raise _LookError(
                    f"it holds more than tensors: {shown(full)}; expected a state dict"
                )
            self._stack.append(_Seen(full))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name == "MARK":
            self._marks.append(len(self._stack))
        elif name.startswith("EMPTY_") and name != "EMPTY_SET":
            self._stack.append(_Seen({"EMPTY_LIST": [], "EMPTY_TUPLE": ()}.get(name)))
        elif name in _JOINS:
            self._join(name)
        elif name == "PROTO" and argument not in (2, 3):
            raise _LookError(
                f"its pickle has protocol {argument}; expected 2, as torch.save writes"
            )
        elif name not in ("PROTO", "STOP"):
            raise _LookError(f"its pickle has the instruction {name}; expected a state dict")

    def _join(self, name: str) -> None:
        stack, count = self._stack, _JOINS[name]
        first = self._marks.pop() if count is None else len(stack) - count
        items = stack[first:]
        if first < 0 or (count is not None and len(items) != count):
            raise IndexError
        del stack[first:]
        depth = 1 + max((item.depth for item in items), default=0)
        if depth > _MAX_DEPTH:
            raise _LookError(f"its pickle has objects in more than {_MAX_DEPTH} others")
        values = [item.value for item in items]
        if name.startswith("TUPLE"):
            stack.append(_Seen(tuple(values), depth))
        elif name in ("REDUCE", "NEWOBJ"):
            made = _made(*values)
            self._odd = made if isinstance(made, _Odd) else self._odd
            stack.append(_Seen(made, depth))
        elif name == "BINPERSID":
            stack.append(_Seen(self._stored(values[0]), depth))
        else:
            into = stack.pop()
            if name.startswith("SETITEM"):
                _check_items(items)
            elif name.startswith("APPEND") and isinstance(into.value, list):
                into.value.extend(values)
            elif into.value != _ORDERED:
                raise _LookError("its pickle changes an object; expected a state dict")
            stack.append(into._replace(depth=max(into.depth, depth)))

    def _stored(self, place: object) -> _Stored:
        if not isinstance(place, tuple) or len(place) not in (5, 6) or place[0] != "storage":
            raise _LookError("one of its tensors has no storage")
        _, kind, key, _, count, *view = place
        item_bytes = _ITEM_BYTES.get(str(kind))
        if item_bytes is None or not isinstance(key, str) or not _are_sizes((count,)):
            raise _LookError(f"one of its storages is of unknown type ({shown(kind)})")
        nbytes = count * item_bytes
        if any(each is not None for each in view) or self.storages.get(key, nbytes) != nbytes:
            raise _LookError(f"its storage {shown(key)} is used in parts; expected whole storages")
        self.storages[key] = nbytes
        return _Stored(nbytes, item_bytes)


def _check_items(items: list[_Seen]) -> None:
    """Refuse keys that are slow to find, and name the key of a tensor that is refused."""
    for key, item in zip(items[::2], items[1::2], strict=True):
        value = key.value
        is_text = isinstance(value, str) and len(value) <= _MAX_TEXT
        if key.depth or not (is_text or (type(value) is int and abs(value) < _MAX_NUMBER)):
            raise _LookError("one of its keys is no short text")
        if isinstance(item.value, _Odd):
            raise _LookError(f"{shown(value)} {item.value.why}")


def _made(name: object, arguments: object) -> object:
    """Return what is known of the result of a call; refuse one that PyTorch should not make."""
    if name not in _CALLS or not isinstance(arguments, tuple):
        raise _LookError(f"its pickle calls {shown(name)}; expected a state dict")
    if name == _FROM_TYPE:
        if arguments[0] not in (_TENSORS | _WRAPPERS | _OTHER_TENSORS.keys()):
            raise _LookError(f"its pickle calls {shown(arguments[0])}; expected a state dict")
        return _made(arguments[0], arguments[2])
    if name in _WRAPPERS:
        return arguments[0]
    if name in _OTHER_TENSORS:
        return _Odd(f"is {_OTHER_TENSORS[str(name)]}; expected a plain tensor")
    if name in _TENSORS:
        return _tensor(*arguments)
    # A number would be the length; other encodings can be slow.
    if name in _BYTE_ARRAYS and arguments and isinstance(arguments[0], int):
        raise _LookError(f"its pickle needs a bytearray of {arguments[0]} bytes")
    if name == "_codecs.encode" and arguments[1:] != ("latin1",):
        raise _LookError("its pickle encodes a text; expected a state dict")
    return name


def _tensor(stored: object, offset: object, shape: object, stride: object, *more: object) -> object:
    """Compare a tensor with its storage, which PyTorch would enlarge for it."""
    if not isinstance(stored, _Stored):
        return _Odd("has no storage")
    if not isinstance(offset, int) or not _are_sizes((offset,)):
        return _Odd("has no valid offset")
    if not _are_sizes(shape) or not _are_sizes(stride):
        return _Odd("has no valid shape")
    if len(shape) != len(stride):
        return _Odd(f"has {len(shape)} dimensions and {len(stride)} strides")
    dtype = _DTYPES.get(str(more[2])) if len(more) > 2 else None
    item_bytes = stored.item_bytes if dtype is None else dtype.itemsize
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if prod(shape) and max(last + 1, prod(shape)) * item_bytes > stored.nbytes:
        return _Odd(f"is {list(shape)}; its storage has only {stored.nbytes // item_bytes} values")
    return None


def _are_sizes(value: object) -> TypeGuard[tuple[int, ...]]:
    """Return whether `value` is a tuple of integers in the range of sizes."""
    return isinstance(value, tuple) and all(type(v) is int and 0 <= v < 1 << 48 for v in value)
