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

import torch
from torch import Tensor

from ...kernels import (
    PICKLE,
    SAFETENSORS,
    ZIP,
    Header,
    first_line,
    kind_of,
    read_header,
    shown,
)
from .torch_look import check_pickles, check_zip

_EXPECTED = "expected a .safetensors or .pth file"

# Most bytes that tensors may share, as tied weights do.
_MAX_SHARED = 64 << 20


def read_file(path: Path) -> dict[object, object]:
    """Read the state dict of a safetensors or PyTorch file: tensors, and other values unchanged."""
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
            header = read_header(file, size)
            # Private and writable, as PyTorch requires: writes to the tensors do not reach the
            # file.
            return _mapped(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), header)
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
    return _state_dict(value, most)


def _mapped(data: mmap.mmap, header: Header) -> dict[object, object]:
    """Return the tensors of a safetensors file, in its memory."""
    tensors: dict[object, object] = {}
    for key, place in header.places.items():
        dtype, (first, last) = place.torch_dtype, place.offsets
        if dtype is None:
            raise ValueError(f"{shown(key)} is of dtype {shown(place.dtype)}; expected floats")
        if first == last:
            raise ValueError(f"{shown(key)} is {list(place.shape)}; expected no size of 0")
        count = (last - first) // dtype.itemsize
        flat = torch.frombuffer(data, dtype=dtype, offset=header.start + first, count=count)
        tensors[key] = _aligned(flat.view(place.shape))
    return tensors


def _state_dict(value: object, most: int) -> dict[object, object]:
    """Return the state dict in the content of a file with `most` bytes of storages.

    It is the content itself, or one entry of it. PyTorch compares neither storages with the file,
    nor tensors whose steps are 0 with their storages.
    """
    for key in ("state_dict", "model", "vae"):
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}; expected a state dict")
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
    read: dict[object, object] = dict(value)
    read.update((key, _aligned(tensor)) for key, tensor in tensors.items())
    return read


def _aligned(tensor: Tensor) -> Tensor:
    """Copy a tensor that old files do not align; vector instructions of some processors need it."""
    return tensor if tensor.data_ptr() % tensor.itemsize == 0 else tensor.clone()
