"""The kind of a file by its first bytes, and the header of a safetensors file.

The format has eight bytes with the length of the header, a JSON object with the dtype, shape and
offsets of each tensor, and the data (https://github.com/huggingface/safetensors). All sizes of a
header are compared with the file before anything of a declared size is allocated.
"""

import json
import re
from math import prod
from typing import Any, BinaryIO, NamedTuple

import torch

from .messages import shown

SAFETENSORS, ZIP, PICKLE = "a safetensors file", "a zip archive", "a pickle"

# The largest models have about 5,000 tensors; each one costs time before its name is rejected.
MAX_TENSORS = 20_000

# JSON becomes Python objects of ten times its size, lists of twenty times.
_MAX_HEADER = 16 << 20
_MAX_LISTS = 500_000
_MAX_KEY, _MAX_DIMENSIONS = 1000, 8

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "C64": "complex64",
}  # fmt: skip

# First bytes of other files that end up with the names of weights, by mistake or a failed download.
_BEGINNINGS = (
    (re.compile(rb"PK\x03\x04"), ZIP),
    (re.compile(rb"\x80[\x02-\x05]"), PICKLE),
    (re.compile(rb"version https://git-lfs"), "a git-lfs pointer and not the file itself"),
    (re.compile(rb"\s*<(!doctype|html|head|body)", re.IGNORECASE), "an HTML page"),
    (re.compile(rb"\s*<"), "XML"),
    (re.compile(rb"GGUF"), "a GGUF file"),
    (re.compile(rb"PK(\x05\x06|\x07\x08)"), "an empty or divided zip archive"),
    (re.compile(rb"\x1f\x8b|\xfd7zXZ|BZh|7z\xbc\xaf|Rar!|\x28\xb5\x2f\xfd"), "a packed archive"),
    (re.compile(rb"\x89HDF"), "an HDF5 file"),
    (re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF"), "a picture or a video"),
    (re.compile(rb"....ftyp|\x1aE\xdf\xa3", re.DOTALL), "a video"),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive"),
    (re.compile(rb"\0+\Z"), "filled with zeros"),
)  # fmt: skip


class Place(NamedTuple):
    """Entry of a tensor in the header of a safetensors file."""

    dtype: str  # the format's name
    shape: tuple[int, ...]
    offsets: tuple[int, int]  # first byte and the byte after the last, from the start of the data

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype in PyTorch; None: PyTorch has no such dtype."""
        return getattr(torch, _DTYPES.get(self.dtype, ""), None)


class Header(NamedTuple):
    """Header of a safetensors file."""

    start: int  # offset of the data in bytes
    places: dict[str, Place]  # by the names of the tensors
    metadata: dict[str, str]


def kind_of(file: BinaryIO, size: int) -> str:
    """Return the kind of a file of `size` bytes as a phrase after "it is"; it is rewound."""
    file.seek(0)
    head = file.read(4096)
    file.seek(0)
    if not head:
        return "empty"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return SAFETENSORS
    for pattern, kind in _BEGINNINGS:
        if pattern.match(head):
            return kind
    # Cut off within its header. Other files with this byte at this place are listed above.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40:
        return SAFETENSORS
    text = head.decode("utf-8", "ignore")
    printable = all(part.isprintable() or part.isspace() for part in text)
    is_text = printable and len(text) > 3 and len(text) >= len(head) // 2
    return "a text" if is_text else "of an unknown kind"


def read_header(file: BinaryIO, size: int) -> Header:
    """Read the header of a safetensors file of `size` bytes and compare it with the file."""
    # Each tensor must have the size of its dtype and shape and start where the one before ends; the
    # last one must end with the file.
    try:
        return _checked(file, size)
    except (ValueError, RecursionError) as error:
        why = str(error) if type(error) is ValueError else "its header is not valid JSON"
        raise ValueError(f"it is not a complete safetensors file: {why}") from None


def _checked(file: BinaryIO, size: int) -> Header:
    kind = kind_of(file, size)
    if kind != SAFETENSORS:
        raise ValueError(f"it is {kind}")
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise ValueError(f"it has {size} bytes; its header alone has {length}")
    if length > _MAX_HEADER:
        raise ValueError(f"its header has {length} bytes; expected at most {_MAX_HEADER}")
    data = file.read(length)
    if data.count(b'"data_offsets"') > MAX_TENSORS or data.count(b"[") > _MAX_LISTS:
        raise ValueError(f"it has more than {MAX_TENSORS} tensors")
    content = json.loads(
        data.decode("utf-8"), object_pairs_hook=_without_repeats, parse_int=_short_number
    )
    metadata = content.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is not text")
    if len(content) > MAX_TENSORS:
        raise ValueError(f"it has {len(content)} tensors; expected at most {MAX_TENSORS}")
    places = {key: _place(key, entry) for key, entry in content.items()}
    end = 0
    for place in sorted(places.values(), key=lambda place: place.offsets):
        if place.offsets[0] != end:
            raise ValueError(f"its tensors overlap or leave a gap at byte {place.offsets[0]}")
        end = place.offsets[1]
    if end != size - 8 - length:
        raise ValueError(f"its tensors need {end} bytes; the file has {size - 8 - length} of data")
    return Header(8 + length, places, metadata)


def _place(key: str, entry: Any) -> Place:  # noqa: ANN401, whatever was in the file
    """Check the entry of one tensor and return its place."""
    if len(key) > _MAX_KEY:
        raise ValueError(f"{shown(key)} has {len(key)} characters; expected at most {_MAX_KEY}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown(key)} has other entries than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise ValueError(f"{shown(key)} has an invalid dtype, shape or offset")
    if len(shape) > _MAX_DIMENSIONS or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{shown(key)} has {len(shape)} dimensions or invalid offsets")
    place = Place(dtype, tuple(shape), (offsets[0], offsets[1]))
    known = place.torch_dtype
    if known is not None and prod(shape) * known.itemsize != offsets[1] - offsets[0]:
        raise ValueError(
            f"{shown(key)} is {dtype} {shape}, but has {offsets[1] - offsets[0]} bytes"
        )
    return place


def _are_sizes(value: Any) -> bool:  # noqa: ANN401, whatever was in the file
    """Return whether `value` is a list of integers in the range of sizes."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 48 for v in value)


def _short_number(digits: str) -> int:
    """Parse an integer; a long one becomes -1: Python takes minutes for a million digits."""
    return int(digits) if len(digits) < 20 else -1


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("its header has a key twice")
    return content
