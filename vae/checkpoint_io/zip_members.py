"""The members of a zip archive as PyTorch writes it: stored, and without overlaps.

The directory of an archive is compared with the file before a member is read. A member that is
compressed, overlaps another, or is larger than the file would be larger in memory than on the disk.

Source of the layout: PKWARE, APPNOTE.TXT, sections 4.3.7 to 4.3.16.
"""

import struct
from itertools import pairwise
from typing import NamedTuple

from ...kernels import shown

_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64, _LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"
_LOCAL_HEAD = struct.Struct("<4s22xHH")
_CENTRAL_HEAD = struct.Struct("<4s4xHH8xIIHHH8xI")
_END_HEAD = struct.Struct("<4s4xHHIIH")
_END64_HEAD = struct.Struct("<4s28xQQQ")
_LOCATOR64_HEAD = struct.Struct("<4s4xQ4x")

_MAX_MEMBERS = 20_000
_MAX_COMMENT = 1 << 16
_FULL, _FULL_SHORT, _ENCRYPTED = 0xFFFFFFFF, 0xFFFF, 1


class ZipMember(NamedTuple):
    """The bytes of one member: offset and size."""

    first: int
    size: int


def zip_members(data: memoryview) -> dict[str, ZipMember]:
    """Return the place of each member of an archive by name.

    Args:
        data: The file.

    Returns:
        The members.

    Raises:
        ValueError: The archive is damaged, has too many members, or one that is compressed,
            repeated or incomplete.
    """
    try:
        return _members(data)
    except (struct.error, OverflowError, UnicodeDecodeError):
        raise ValueError("the directory of its zip archive is damaged") from None


def _members(data: memoryview) -> dict[str, ZipMember]:
    count, at, end = _directory(data)
    if count > _MAX_MEMBERS:
        raise ValueError(f"its zip archive has {count} members; expected at most {_MAX_MEMBERS}")
    found: dict[str, ZipMember] = {}
    spans: list[tuple[int, int]] = []
    for _ in range(count):
        head = _CENTRAL_HEAD.unpack_from(data, at)
        signature, flags, method, packed, size, name_size, extra_size, comment_size, local = head
        at += _CENTRAL_HEAD.size
        name = bytes(data[at : at + name_size]).decode("utf-8")
        extra = data[at + name_size : at + name_size + extra_size]
        at += name_size + extra_size + comment_size
        if signature != _CENTRAL or at > end:
            raise ValueError("the directory of its zip archive is damaged")
        size, packed, local = _wide(extra, size, packed, local)
        if method or flags & _ENCRYPTED or size != packed:
            raise ValueError(
                f"its member {shown(name)} is compressed or encrypted; expected it stored"
            )
        if name in found:
            raise ValueError(f"its member {shown(name)} exists twice")
        signature, *skipped = _LOCAL_HEAD.unpack_from(data, local)
        first = local + _LOCAL_HEAD.size + sum(skipped)
        if signature != _LOCAL or first + size > end:
            raise ValueError(f"its member {shown(name)} is incomplete: {size} bytes at {first}")
        found[name] = ZipMember(first, size)
        spans.append((local, first + size))
    spans.sort()
    if any(one[1] > two[0] for one, two in pairwise(spans)):
        raise ValueError("members of its zip archive overlap")
    return found


def _directory(data: memoryview) -> tuple[int, int, int]:
    """Return the number of entries of the directory, its start and its end."""
    tail = max(0, len(data) - _MAX_COMMENT - _END_HEAD.size)
    found = bytes(data[tail:]).rfind(_END)
    if found < 0:
        raise ValueError("it is a truncated zip archive")
    place = tail + found
    _, _, count, size, first, _ = _END_HEAD.unpack_from(data, place)
    end = place
    if count == _FULL_SHORT or size == _FULL or first == _FULL:
        locator = place - _LOCATOR64_HEAD.size
        signature, end = _LOCATOR64_HEAD.unpack_from(data, max(0, locator))
        if signature != _LOCATOR64 or end > locator:
            raise ValueError("the directory of its zip archive is damaged")
        signature, count, size, first = _END64_HEAD.unpack_from(data, end)
        if signature != _END64:
            raise ValueError("the directory of its zip archive is damaged")
    if first + size > end:
        raise ValueError("the directory of its zip archive is missing")
    return count, first, end


def _wide(extra: memoryview, size: int, packed: int, local: int) -> tuple[int, int, int]:
    """Return the three numbers, with those of 64 bits read from the extra field."""
    numbers = [size, packed, local]
    if _FULL not in numbers:
        return size, packed, local
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            numbers = [next(wide, n) if n == _FULL else n for n in numbers]
            break
        at += 4 + length
    return numbers[0], numbers[1], numbers[2]
