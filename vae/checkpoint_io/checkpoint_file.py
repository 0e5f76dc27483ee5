"""Read the tensors of a file, or report in one line what the file is instead.

The kind of a file is read from its first bytes, not from its name. All sizes are compared with the
file. PyTorch reads pickles with `weights_only`, which runs no code; before that their instructions
are counted, and all names in them have to be of those that `torch.save` writes for tensors, because
a call such as `bytearray(10**9)` is allowed there too.
"""

import io
import mmap
import os
import pickle
import re
import warnings
from itertools import islice
from pathlib import Path
from pickletools import genops
from typing import BinaryIO
from zipfile import ZipFile

import torch
from torch import Tensor

from ...kernels import PICKLE, SAFETENSORS, ZIP, first_line, kind_of, read_header, shown
from .networks import Network, flattened

_EXPECTED = "expected a .safetensors or .pth file"
_STATE_DICT = "expected a state dict"

# Most bytes that tensors may share, as tied weights do.
_MOST_SHARED = 64 << 20

# A tensor takes about 40 instructions and 170 bytes.
_MOST_INSTRUCTIONS, _MOST_BYTES = 300_000, 16 << 20

_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")

# With classes and dtypes, but without the storages of quantised tensors.
_NAMED = re.compile(
    r"torch\._utils\._rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.(Size|device|serialization\._get_layout)"
    r"|collections\.(OrderedDict|Counter)|(builtins|__builtin__)\.(set|complex)|_codecs\.encode"
    r"|torch\.(Tensor|nn\.parameter\.Parameter|storage\.UntypedStorage|(cuda\.)?[A-PR-Z]\w+Storage"
    r"|bool|u?int\d+|(b?float|complex)\d\w+)"
)


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
        most = _check_zip(file) if kind == ZIP else _check_legacy(file, size)
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


def _check_zip(file: BinaryIO) -> int:
    """Refuse a damaged file of PyTorch 1.6 or later; return the bytes of its storages."""
    try:
        archive = ZipFile(file)
        members = archive.infolist()
    except Exception:  # BadZipFile, or what a damaged field leads to
        raise ValueError("it is a truncated zip archive, or its directory is damaged") from None
    names = {each.filename.lower(): each for each in members}  # as PyTorch compares them
    pickled = names.get(next(iter(names), "").partition("/")[0] + "/data.pkl")
    if pickled is None:
        raise ValueError("it is a zip archive without a PyTorch state dict")
    if len(names) < len(members):
        raise ValueError("two members of its zip archive have one name")
    for each in members:
        packed = each.compress_type or each.flag_bits & 1 or each.file_size != each.compress_size
        if packed or each.header_offset + each.file_size > archive.start_dir:
            what = "is compressed or encrypted, or incomplete; expected it stored"
            raise ValueError(f"its member {shown(each.filename)} {what}")
    file.seek(pickled.header_offset + 26)
    sizes = file.read(4)  # of the name and of other fields
    file.seek(int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little"), 1)
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
    """Count the instructions of a pickle, and refuse names that no state dict needs."""
    try:
        instructions = [*islice(genops(file), _MOST_INSTRUCTIONS + 1)]
    except ValueError:
        raise ValueError("its pickle is damaged or too large") from None
    if len(instructions) > _MOST_INSTRUCTIONS:
        raise ValueError(f"its pickle has more than {_MOST_INSTRUCTIONS} instructions")
    for instruction, argument, _ in instructions:
        name = str(argument).replace(" ", ".", 1)
        if instruction.name in ("GLOBAL", "INST") and not _NAMED.fullmatch(name):
            raise ValueError(f"it holds more than tensors: {shown(name)}; {_STATE_DICT}")
