"""A look at a PyTorch file before `torch.load(weights_only=True)` reads it.

`torch.load` calls functions for tensors only, but with any arguments: a pickle of 30 bytes can take
a gigabyte (`bytearray(10**9)`), overflow the stack (nested tuples) or never end (their hashes). So
only what a state dict needs is admitted, and arguments of a limited size.

Source of the layout: torch/serialization.py and torch/_weights_only_unpickler.py of PyTorch 2.13.
"""

import io
import struct
from pickletools import genops
from typing import BinaryIO, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch

from ...kernels import shown

# A tensor takes about 40 instructions and 170 bytes, a member of an archive 120 bytes.
_MAX_INSTRUCTIONS = 300_000
_MAX_BYTES = 16 << 20
_MAX_DIRECTORY = 4 << 20

# A hash visits all tuples in a tuple, large numbers can have equal hashes, and long texts are slow
# to compare.
_MAX_TUPLES, _MAX_LARGE, _MAX_TEXT = 100, 1000, 1000
_LARGE = 1 << 32

_MAGIC = 0x1950A86A20F9469CFC6C

_ENCODE = "_codecs.encode"
_NAMES = {
    *(f"torch._utils._rebuild_tensor{end}" for end in ("", "_v2", "_v3")),
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2", "torch.Tensor", "torch.nn.parameter.Parameter",
    *(
        f"{module}.{kind}Storage"
        for module in ("torch", "torch.cuda")
        for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte",
                     "Bool", "ComplexFloat", "ComplexDouble")
    ),
    "torch.storage.UntypedStorage", "collections.OrderedDict",
    # What training saves next to weights.
    "collections.Counter", "torch.Size", "torch.device", "torch.serialization._get_layout", _ENCODE,
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "complex")),
    *(str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)),
}  # fmt: skip

_LITERALS = {
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINSTRING", "EMPTY_DICT", "EMPTY_LIST",
}  # fmt: skip
# Instructions that join objects: how many, or None for all from the mark on.
_JOINS = {
    "TUPLE": None, "EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1,
    "APPENDS": None, "SETITEM": 2, "SETITEMS": None, "REDUCE": 2, "NEWOBJ": 2, "BUILD": 1,
    "BINPERSID": 1,
}  # fmt: skip


class _Seen(NamedTuple):
    """What is known of an object: the value of a literal, a name or a tuple; the tuples in it."""

    value: object = None
    tuples: int = 0


class _LookError(ValueError):
    """A reason to refuse a file."""


def check_zip(file: BinaryIO, size: int) -> int:
    """Refuse a file of PyTorch 1.6 or later, of `size` bytes; return the bytes of its storages."""
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
    root = members[0].filename.partition("/")[0] if members else ""
    names = {each.filename: each for each in members}
    pickle = names.get(f"{root}/data.pkl")
    if pickle is None:
        raise ValueError("it is a zip archive without a PyTorch state dict")
    if f"{root}/constants.pkl" in names:
        raise ValueError("it is a TorchScript program; expected a state dict")
    if len({name.lower() for name in names}) < len(members):
        raise ValueError("two members of its zip archive have one name")
    for each in members:
        name = f"its member {shown(each.filename)}"
        if each.compress_type or each.flag_bits & 1 or each.file_size != each.compress_size:
            raise ValueError(f"{name} is compressed or encrypted; expected it stored")
        if each.header_offset + each.file_size > first:
            raise ValueError(f"{name} is incomplete: {each.file_size} bytes")
    if pickle.file_size > _MAX_BYTES:
        raise ValueError("its pickle is too large")
    file.seek(pickle.header_offset + 26)
    file.seek(sum(struct.unpack("<HH", file.read(4))), io.SEEK_CUR)
    _check_pickle(io.BytesIO(file.read(pickle.file_size)))
    return sum(each.file_size for each in members if each.filename.startswith(f"{root}/data/"))


def check_pickles(file: BinaryIO, size: int) -> int:
    """Refuse a file from before PyTorch 1.6 unless it is a state dict; return its `size`."""
    file.seek(0)
    pickles = io.BytesIO(file.read(_MAX_BYTES))
    if _MAGIC.to_bytes(10, "little") not in pickles.getbuffer()[:32].tobytes():
        raise ValueError("it is a pickle, but not of PyTorch; expected a state dict")
    for _ in ("magic number", "version", "system", "state dict", "keys of its storages"):
        _check_pickle(pickles)
    return size


def _check_pickle(file: BinaryIO) -> None:
    """Follow a pickle without its objects, and refuse what a state dict does not need."""
    stack: list[_Seen] = []
    marks: list[int] = []
    memo: dict[object, _Seen] = {}
    large = 0
    try:
        for count, (instruction, argument, _) in enumerate(genops(file)):
            name = instruction.name
            if count > _MAX_INSTRUCTIONS:
                raise _LookError(f"its pickle has more than {_MAX_INSTRUCTIONS} instructions")
            large += type(argument) is int and abs(argument) >= _LARGE
            if large > _MAX_LARGE:
                raise _LookError(f"its pickle has more than {_MAX_LARGE} large numbers")
            if name in _LITERALS:
                stack.append(_Seen(argument))
            elif name == "GLOBAL":
                stack.append(_Seen(_admitted(str(argument).replace(" ", ".", 1))))
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "MARK":
                marks.append(len(stack))
            elif name in _JOINS:
                joined = _JOINS[name]
                first = marks.pop() if joined is None else len(stack) - joined
                items = stack[first:]
                del stack[first:]
                stack += _made(name, items)
            elif name not in ("PROTO", "STOP"):
                raise _LookError(f"its pickle has the instruction {name}; expected a state dict")
    except _LookError:
        raise
    except (ValueError, LookupError, TypeError):
        raise ValueError("its pickle is damaged or too large") from None


def _admitted(name: str) -> str:
    if name not in _NAMES:
        raise _LookError(f"it holds more than tensors: {shown(name)}; expected a state dict")
    return name


def _made(name: str, items: list[_Seen]) -> list[_Seen]:
    """Return what an instruction makes of `items`; those that go into an object make nothing."""
    if "TUPLE" in name:
        tuples = 1 + sum(item.tuples for item in items)
        if tuples > _MAX_TUPLES:
            raise _LookError(f"its pickle has more than {_MAX_TUPLES} tuples in one")
        return [_Seen(tuple(item.value for item in items), tuples)]
    if name in ("REDUCE", "NEWOBJ"):
        function, arguments = (item.value for item in items)
        # Other encodings than that of bytes can be slow.
        if function == _ENCODE and not (isinstance(arguments, tuple) and "latin1" in arguments[1:]):
            raise _LookError("its pickle encodes a text; expected a state dict")
        return [_Seen()]
    if name.startswith("SETITEM"):
        for key, _ in zip(items[::2], items[1::2], strict=True):
            short = isinstance(key.value, str) and len(key.value) <= _MAX_TEXT
            if not short and not (type(key.value) is int and abs(key.value) < _LARGE):
                raise _LookError("one of its keys is no short text")
    return [_Seen()] if name == "BINPERSID" else []
