"""The structures that the kernels read, in the layout of `csrc/cuda`.

Each function returns the fields of a structure as a format of Python's `struct` and its values.
Structures of 8-byte fields come first, so that padding is the same on both sides.
"""

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..shapes import blocks as blocks
from ..shapes import strides
from .runtime import refuse_counts

# Fields of a structure: their format, and their values.
Fields = tuple[str, tuple[float | bytes, ...]]

# Threads of a block.
THREADS = 256

_PACK_BYTES = 16


def packed(*fields: Fields) -> bytes:
    """Return the memory of a structure, padded to its alignment of 8 bytes."""
    form, values = _joined(fields)
    return struct.pack(f"@{form}0q", *values)


def _joined(fields: Sequence[Fields]) -> Fields:
    return "".join(form for form, _ in fields), tuple(each for _, of in fields for each in of)


def pointer(x: Tensor | None) -> Fields:
    """Return the address of `x` `[...]`; null for None."""
    return "P", (0 if x is None else x.data_ptr(),)


def video(x: Tensor | None) -> Fields:
    """Return `Video`: the address, null for None, and the strides of batch and time."""
    return "Pqq", (0 if x is None else x.data_ptr(), *strides(x))


def vector(values: Tensor | None) -> Fields:
    """Return `Vector` of `C` dense values, in float32 or in the dtype of the activations."""
    return "Pq", (0, 0) if values is None else (values.data_ptr(), values.dtype == torch.float32)


@functools.lru_cache(maxsize=4096)
def divisor(by: int) -> Fields:
    """Return `Divisor`: `n / by` is `(high word of n * magic + n) >> shift` for `n` below 2^31."""
    refuse_counts(by)
    shift = (by - 1).bit_length()
    magic = ((1 << 32) * ((1 << shift) - by)) // by + 1
    return "III", (by, magic, shift)


class Items(NamedTuple):
    """The items of work of a launch: their number, and `Items` of the sources."""

    count: int
    fields: Fields


def items(parts: int, frames: int, videos: int) -> Items:
    """Return the items of `videos` with `frames` of some `parts` each, or refuse too many."""
    count = parts * frames * videos
    refuse_counts(count)
    fields = ("I", (count,)), divisor(parts), divisor(frames)
    return Items(count, _joined(fields))


def pack_of(
    dtype: torch.dtype, channels: int, *fields: Fields, codes: Sequence[Fields] = ()
) -> int:
    """Return how many numbers a thread reads at once: those of 16 bytes, or 1."""
    # `fields` are `Video`s and `Vector`s, `codes` are `Video`s of single bytes; one that is not
    # aligned makes it 1.
    count = _PACK_BYTES // dtype.itemsize
    if channels % count:
        return 1
    aligned = [(_PACK_BYTES, each) for each in fields] + [(count, each) for each in codes]
    for size, (form, (address, *steps)) in aligned:
        if int(address) % size:
            return 1
        if form == "Pqq" and any(stride % count for stride in steps):
            return 1
    return count
