"""Read the tensors of a file, or report in one line what the file is instead.

The kind of a file is read from its first bytes, not from its name. The places of its tensors are
compared with its size, and only valid ones are mapped into memory, so reading needs no more memory
than the file has. Nothing in a file is executed.
"""

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from ...kernels import PICKLE, SAFETENSORS, ZIP, Header, kind_of, read_header, shown
from .torch_files import Numbers, contiguous, legacy_numbers, zip_numbers

_EXPECTED = "expected a .safetensors or .pth file"


def read_file(path: Path) -> dict[object, object]:
    """Read the state dict of a checkpoint file.

    Args:
        path: A safetensors file, or a PyTorch file with tensors only, with any name.

    Returns:
        Its entries: memory-mapped tensors, and other values unchanged.

    Raises:
        OSError: The file is missing or cannot be opened.
        ValueError: It is empty, damaged, of another kind, holds more than tensors, or tensors that
            are larger in memory than on the disk.
    """
    if path.is_dir():
        raise ValueError(f"it is a folder; {_EXPECTED}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; {_EXPECTED}")
    if not path.is_file():
        raise ValueError(f"it is a device; {_EXPECTED}")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        kind = kind_of(file, size)
        if kind not in (SAFETENSORS, ZIP, PICKLE):
            raise ValueError(f"it is {kind}, not a complete .safetensors or .pth file")
        header = read_header(file, size) if kind == SAFETENSORS else None
        # Private and writable, as PyTorch requires: writes to the tensors do not reach the file.
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    if header is not None:
        return _of_safetensors(mapped, header)
    with memoryview(mapped) as data:
        state = zip_numbers(data) if kind == ZIP else legacy_numbers(data)
    return {
        key: _tensor(mapped, value) if isinstance(value, Numbers) else value
        for key, value in state.items()
    }


def _of_safetensors(mapped: mmap.mmap, header: Header) -> dict[object, object]:
    tensors: dict[object, object] = {}
    for key, place in header.places.items():
        dtype, (first, last) = place.torch_dtype, place.offsets
        if dtype is None:
            raise ValueError(f"{shown(key)} is of dtype {shown(place.dtype)}; expected floats")
        if first == last:
            raise ValueError(f"{shown(key)} is {list(place.shape)}; expected no size of 0")
        numbers = Numbers(header.start + first, 0, dtype, place.shape, contiguous(place.shape))
        tensors[key] = _tensor(mapped, numbers)
    return tensors


def _tensor(mapped: mmap.mmap, numbers: Numbers) -> Tensor:
    dtype, first = numbers.dtype, numbers.first + numbers.offset * numbers.dtype.itemsize
    flat = torch.frombuffer(mapped, dtype=dtype, offset=first, count=numbers.reach)
    tensor = flat.as_strided(numbers.shape, numbers.stride)
    # Old files do not align their data, which vector instructions of some processors need.
    return tensor if first % dtype.itemsize == 0 else tensor.clone()
