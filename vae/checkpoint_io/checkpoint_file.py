"""Read the tensors of a file, or report in one line what the file is instead.

The kind of a file is read from its first bytes, not from its name. All sizes are compared with the
file, and nothing in it is executed. `torch.load(weights_only=True)` calls functions for tensors
only, but with any arguments: a pickle of 30 bytes can take a gigabyte (`bytearray(10**9)`) or never
end (the hash of tuples that share their parts). So calls are looked at first, and only those of
`torch.save` are admitted, which take a time in proportion to the file.

Source of the layout: torch/serialization.py and torch/_weights_only_unpickler.py of PyTorch 2.13.
"""

import io
import mmap
import os
import pickle
import re
import struct
import warnings
from itertools import islice
from pathlib import Path
from pickletools import genops
from typing import Any, BinaryIO
from zipfile import ZipFile

import torch
from torch import Tensor

from ...kernels import PICKLE, SAFETENSORS, ZIP, first_line, kind_of, read_header, shown
from .networks import Network, flattened

_EXPECTED = "expected a .safetensors or .pth file"
_STATE_DICT = "expected a state dict"

# Most bytes that tensors may share, as tied weights do.
_MOST_SHARED = 64 << 20

# A tensor takes about 40 instructions and 170 bytes, a member of an archive 120 bytes.
_MOST_INSTRUCTIONS, _MOST_BYTES, _MOST_DIRECTORY = 300_000, 16 << 20, 4 << 20

_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")

# With classes and dtypes, but without the storages of quantised tensors.
_NAMED = re.compile(
    r"torch\._utils\._rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.(Size|device|serialization\._get_layout)"
    r"|collections\.(OrderedDict|Counter)|(builtins|__builtin__)\.(set|complex)|_codecs\.encode"
    r"|torch\.(Tensor|nn\.parameter\.Parameter|storage\.UntypedStorage|(cuda\.)?[A-PR-Z]\w+Storage"
    r"|bool|u?int\d+|(b?float|complex)\d\w+)"
)
# Those that are called with numbers and texts alone.
_VALUES = ("Size", "device", "_get_layout", "OrderedDict", "set", "complex")

# What a pickle has in two places, other than short texts. `torch.save` passes it to no function; a
# hostile file could with it pass a long text, or a list of lists of lists, 100,000 times.
_SHARED = object()

_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
# Instructions that take objects: how many, or None for all from the mark on.
_TAKERS = {
    "TUPLE": None, "APPENDS": None, "SETITEMS": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3,
    "APPEND": 1, "SETITEM": 2, "REDUCE": 2, "BUILD": 1, "BINPERSID": 1,
}  # fmt: skip


def read_file(path: Path, network: Network) -> dict[str, object]:
    """Read what could be a `network` in a safetensors or PyTorch file.

    All entries are there by name, for `Network.take`; only the values of networks are checked.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; {_EXPECTED}")
    if not path.is_file():
        raise ValueError(f"it is a {'folder' if path.is_dir() else 'device'}; {_EXPECTED}")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        kind = kind_of(file, size)
        if kind == SAFETENSORS:
            return _mapped(file, size, network)
        if kind not in (ZIP, PICKLE):
            raise ValueError(f"it is {kind}, not a complete .safetensors or .pth file")
        most = _check_zip(file, size) if kind == ZIP else _check_legacy(file, size)
        file.seek(0)
        # PyTorch maps files by path, and takes one of this suffix for a safetensors file.
        maps = kind == ZIP and path.suffix != ".safetensors"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of pickle protocol 3, which PyTorch reads too
                value = torch.load(path if maps else file, "cpu", weights_only=True, mmap=maps)
        except pickle.UnpicklingError:  # whose text is advice to trust the file
            raise ValueError("its pickle is damaged, or holds more than tensors") from None
        except Exception as error:  # a lack of memory too: the sizes are those of the file
            raise ValueError(f"PyTorch cannot read it ({shown(first_line(error))})") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}; {_STATE_DICT}")
    entries = flattened(value)
    for names in network.places(entries).values() or [entries]:
        found = [(name, entries[name]) for name in names]
        tensors = {name: Tensor.detach(each) for name, each in found if isinstance(each, Tensor)}
        _check_stored([*tensors.values()], most)
        entries |= tensors
    return entries


def _mapped(file: BinaryIO, size: int, network: Network) -> dict[str, object]:
    """Return the tensors of a safetensors file, in its memory."""
    header = read_header(file, size)
    tensors: dict[str, object] = dict(header.places)
    found = network.places(header.places).values()
    places = {name: header.places[name] for keys in found for name in keys}
    if not places:
        return tensors
    # Only the part with the network: the file can be larger than the memory, and systems count a
    # private map as a copy. It is private and writable, as PyTorch requires: writes to the tensors
    # do not reach the file.
    start = header.start + min(place.offsets[0] for place in places.values())
    start -= start % mmap.ALLOCATIONGRANULARITY
    length = header.start + max(place.offsets[1] for place in places.values()) - start
    data = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
    for key, place in places.items():
        dtype, (first, last) = place.torch_dtype, place.offsets
        if dtype is None or first == last:
            kind = f"{shown(place.dtype)} {list(place.shape)}"
            raise ValueError(f"{shown(key)} is {kind}; expected floats and no size of 0")
        offset, count = header.start + first - start, (last - first) // dtype.itemsize
        flat = torch.frombuffer(data, dtype=dtype, offset=offset, count=count)
        tensors[key] = flat.view(place.shape)
    return tensors


def _check_stored(tensors: list[Tensor], most: int) -> None:
    """Compare tensors with their storages and the `most` bytes of their file."""
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    for what, total, limit in (
        ("storages", sum(sizes.values()), most),
        ("tensors", sum(each.nbytes for each in tensors), most + _MOST_SHARED),
        *(("tensors", each.nbytes, each.untyped_storage().nbytes()) for each in tensors),
    ):
        if total > limit:
            raise ValueError(f"its {what} need {total} bytes; the file has {min(most, limit)}")


def _check_zip(file: BinaryIO, size: int) -> int:
    """Refuse a file of PyTorch 1.6 or later, of `size` bytes; return the bytes of its storages."""
    file.seek(max(0, size - 98))
    tail = file.read().rjust(98)
    if tail[76:80] != b"PK\x05\x06":
        raise ValueError("it is a truncated zip archive")
    # PyTorch and zipfile look for the directory in different ways; for this form they agree.
    wide = tail[56:60] == b"PK\x06\x07"
    count, first = struct.unpack("<QQ" if wide else "<II", tail[40:56] if wide else tail[88:96])
    end = size - (98 if wide else 22)
    place = int.from_bytes(tail[64:72], "little") if wide else end
    if first + count != end or place != end or count > _MOST_DIRECTORY:
        raise ValueError("the directory of its zip archive is damaged")
    members = ZipFile(file).infolist()
    names = {each.filename.lower(): each for each in members}  # as PyTorch compares them
    pickled = names.get(next(iter(names), "").partition("/")[0] + "/data.pkl")
    if pickled is None:
        raise ValueError("it is a zip archive without a PyTorch state dict")
    if len(names) < len(members):
        raise ValueError("two members of its zip archive have one name")
    for each in members:
        packed = each.compress_type or each.flag_bits & 1 or each.file_size != each.compress_size
        if packed or each.header_offset + each.file_size > first:
            what = "is compressed or encrypted, or incomplete; expected it stored"
            raise ValueError(f"its member {shown(each.filename)} {what}")
    file.seek(pickled.header_offset + 26)
    file.seek(sum(struct.unpack("<HH", file.read(4))), io.SEEK_CUR)
    _check_pickle(io.BytesIO(file.read(min(pickled.file_size, _MOST_BYTES))))
    return sum(each.file_size for each in members if "/data/" in each.filename)


def _check_legacy(file: BinaryIO, size: int) -> int:
    """Refuse a file from before PyTorch 1.6 unless it is a state dict; return its `size`."""
    data = file.read(_MOST_BYTES)
    if _MAGIC not in data[:32]:
        raise ValueError(f"it is a pickle, but not of PyTorch; {_STATE_DICT}")
    pickles = io.BytesIO(data)
    for _ in ("magic number", "version", "system", "state dict", "keys of its storages"):
        _check_pickle(pickles)
    return size


def _check_pickle(file: BinaryIO) -> None:
    """Follow a pickle with literals and containers alone; refuse what no state dict needs."""
    stacks: list[list[Any]] = [[]]
    memo: dict[Any, Any] = {}
    try:
        instructions = [*islice(genops(file), _MOST_INSTRUCTIONS + 1)]
    except ValueError:
        raise ValueError("its pickle is damaged or too large") from None
    if len(instructions) > _MOST_INSTRUCTIONS:
        raise ValueError(f"its pickle has more than {_MOST_INSTRUCTIONS} instructions")
    for instruction, argument, _ in instructions:
        name, top = instruction.name, stacks[-1]
        if name == "GLOBAL":
            top.append(str(argument).replace(" ", ".", 1))
            if not _NAMED.fullmatch(top[-1]):
                raise ValueError(f"it holds more than tensors: {shown(top[-1])}; {_STATE_DICT}")
        elif name in _EMPTY:
            top.append(_EMPTY[name]())
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = top[-1] if _is_plain(top[-1]) else _SHARED
        elif name in ("BINGET", "LONG_BINGET"):
            top.append(memo[argument])
        elif name == "MARK":
            stacks.append([])
        elif name in _TAKERS:
            taken = _TAKERS[name]
            items = stacks.pop() if taken is None else [top.pop() for _ in range(taken)][::-1]
            top = stacks[-1]
            if "TUPLE" in name:
                top.append(tuple(items))
            elif "APPEND" in name:
                top[-1].extend(items)
            elif "SETITEM" in name:
                if not all(map(_is_plain, items[::2])):
                    raise ValueError(f"one of its keys is no short text; {_STATE_DICT}")
            elif not _is_usual(name, *items):
                raise ValueError(f"its pickle calls functions in unusual ways; {_STATE_DICT}")
            elif name != "BUILD":
                top.append(None)
        elif not instruction.stack_before:
            top += [argument] * len(instruction.stack_after)  # a literal, or nothing
        elif name != "STOP":
            raise ValueError(f"its pickle has the instruction {name}; {_STATE_DICT}")


def _is_plain(value: object) -> bool:
    """Return whether a value is fast to hash and to compare, and few others have its hash."""
    if isinstance(value, str):
        return len(value) <= 1000
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 32)


def _is_usual(*call: Any) -> bool:  # noqa: ANN401, whatever was in the file
    """Return whether a call is one that `torch.save` writes."""
    match call:
        case (
            ("BUILD", {})
            | ("REDUCE", "collections.Counter", ({},))
            | ("REDUCE", "_codecs.encode", (str(), "latin1"))
        ):
            return True
        case "BINPERSID", (_, _, str(), *_) as storage:
            return _is_flat(storage)
        case "REDUCE", function, ([*items],) | [*items] if function.rpartition(".")[2] in _VALUES:
            return all(map(_is_plain, items))
        case "REDUCE", function, arguments:
            called = arguments[0] if function.startswith("torch._tensor.") else function
            return called.startswith("torch._utils.") and _is_flat(arguments)
    return False


def _is_flat(value: object, depth: int = 3) -> bool:
    """Return whether a value has no lists, nothing shared, and tuples in few others."""
    if isinstance(value, tuple):
        return depth > 0 and all(_is_flat(each, depth - 1) for each in value)
    return value is not _SHARED and not isinstance(value, list)
