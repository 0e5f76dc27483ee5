"""Read the tensors of a file, or report in one line what the file is instead.

The kind of a file is read from its first bytes, not from its name. The sizes in a safetensors file
are compared with the file before it is mapped. A PyTorch file is looked at first (`torch_look.py`),
and its tensors are compared with the file once PyTorch has read them. Nothing in it is executed.
"""

import mmap
import os
import pickle
import warnings
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ...kernels import PICKLE, SAFETENSORS, ZIP, first_line, kind_of, read_header, shown
from .networks import Network, flattened
from .torch_look import check_pickles, check_zip

_EXPECTED = "expected a .safetensors or .pth file"

# Most bytes that tensors may share, as tied weights do.
_MAX_SHARED = 64 << 20


def read_file(path: Path, network: Network) -> dict[str, object]:
    """Read what could be a `network` in a safetensors or PyTorch file.

    All entries are there by name, for `Network.take`; only the values of networks are checked.
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
        if kind == SAFETENSORS:
            return _mapped(file, size, network)
        if kind not in (ZIP, PICKLE):
            raise ValueError(f"it is {kind}, not a complete .safetensors or .pth file")
        most = check_zip(file, size) if kind == ZIP else check_pickles(file, size)
        file.seek(0)
        # PyTorch maps files by path, and takes one of this suffix for a safetensors file.
        maps = kind == ZIP and path.suffix != ".safetensors"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of pickle protocol 3, which PyTorch reads too
                value = torch.load(path if maps else file, "cpu", weights_only=True, mmap=maps)
        except pickle.UnpicklingError:  # whose text is advice to trust the file
            raise ValueError("its pickle is damaged") from None
        except Exception as error:  # a lack of memory too: the sizes are those of the file
            raise ValueError(f"PyTorch cannot read it ({shown(first_line(error))})") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}; expected a state dict")
    entries = flattened(value)
    for names in network.places(entries).values() or [entries]:
        entries |= _state_dict({name: entries[name] for name in names}, most)
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
        if dtype is None:
            raise ValueError(f"{shown(key)} is of dtype {shown(place.dtype)}; expected floats")
        if first == last:
            raise ValueError(f"{shown(key)} is {list(place.shape)}; expected no size of 0")
        offset, count = header.start + first - start, (last - first) // dtype.itemsize
        flat = torch.frombuffer(data, dtype=dtype, offset=offset, count=count)
        tensors[key] = _aligned(flat.view(place.shape))
    return tensors


def _state_dict(value: dict[str, object], most: int) -> dict[str, object]:
    """Return the entries of a file with `most` bytes of storages.

    PyTorch compares neither storages with the file, nor tensors whose steps are 0 with their
    storages.
    """
    tensors = {key: Tensor.detach(each) for key, each in value.items() if isinstance(each, Tensor)}
    stored: dict[int, int] = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()
        if tensor.nbytes > storage.nbytes():
            count = storage.nbytes() // tensor.itemsize
            raise ValueError(
                f"{shown(key)} is {list(tensor.shape)}; its storage has only {count} values"
            )
    for what, total, limit in (
        ("storages", sum(stored.values()), most),
        ("tensors", sum(tensor.nbytes for tensor in tensors.values()), most + _MAX_SHARED),
    ):
        if total > limit:
            raise ValueError(f"its {what} need {total} bytes; the file has {most}")
    return value | {key: _aligned(tensor) for key, tensor in tensors.items()}


def _aligned(tensor: Tensor) -> Tensor:
    """Copy a tensor that old files do not align; vector instructions of some processors need it."""
    return tensor if tensor.data_ptr() % tensor.itemsize == 0 else tensor.clone()
