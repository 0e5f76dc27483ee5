"""PyTorch's own files, `.pth`: the places of the tensors of a state dict.

Both formats are a pickle that describes tensors, and storages outside of it: a zip archive with a
member per storage (since PyTorch 1.6), or several pickles followed by the storages (before). The
description is compared with the file before anything is created from it.

Source of the layout: torch/serialization.py and torch/_utils.py of PyTorch 2.13.
"""

import struct
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch

from ...kernels import shown
from .pickles import PersistentId, Pickle, PickleCall, PickleGlobal, read_pickle
from .zip_members import ZipMember, zip_members

_MAGIC = 0x1950A86A20F9469CFC6C

# Most bytes that tensors may share, as tied weights do.
_MAX_SHARED = 64 << 20

_MAX_DIMENSIONS = 8

_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16,
    "BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16,
    "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
_STORAGE_TYPES = {
    f"{module}.{name}Storage": dtype
    for name, dtype in _STORAGES.items()
    for module in ("torch", "torch.cuda")
} | {"torch.storage.UntypedStorage": torch.uint8}

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

# Functions that create a tensor from data in the file, and those that wrap their first argument.
_TENSORS = {f"torch._utils._rebuild_tensor{end}" for end in ("", "_v2", "_v3")}
_WRAPPERS = {
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch.nn.parameter.Parameter",
}
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"

# Functions that create other tensors, with a description.
_OTHER_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor, without numbers",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of a type of its own",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of another device",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of another device",
}

# Names that training saves next to weights, and names of refused tensors. They are not interpreted.
_OTHERS = {
    "collections.OrderedDict", "collections.Counter", "torch.Size", "torch.device", "torch.Tensor",
    "_codecs.encode", "torch.serialization._get_layout",
    *(f"{module}.{name}" for module in ("builtins", "__builtin__")
      for name in ("set", "bytearray", "complex")),
    *(f"torch.Q{kind}Storage" for kind in ("Int8", "UInt8", "Int32", "UInt4x2", "UInt2x4")),
    *(f"torch.per_{kind}" for kind in ("tensor_affine", "tensor_symmetric", "channel_affine",
                                       "channel_symmetric", "channel_affine_float_qparams")),
}  # fmt: skip
_KNOWN = {
    *_TENSORS, *_WRAPPERS, _FROM_TYPE, *_OTHER_TENSORS, *_OTHERS, *_STORAGE_TYPES, *_DTYPES,
}  # fmt: skip


class Numbers(NamedTuple):
    """A tensor in a file.

    Attributes:
        first: Offset of its storage in bytes.
        offset: Offset of the tensor in the storage, in elements.
        dtype: Dtype of the elements.
        shape: Shape of the tensor.
        stride: Strides of each dimension, in elements.
    """

    first: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def reach(self) -> int:
        """Elements from the first to the last, gaps included."""
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor with `shape`."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def zip_numbers(data: memoryview) -> dict[object, object]:
    """Read the state dict of a `.pth` file that is a zip archive.

    Args:
        data: The file.

    Returns:
        `Numbers` for each tensor, and other values unchanged.

    Raises:
        ValueError: It is damaged, or holds more than tensors, or refers to missing data.
    """
    members = zip_members(data)
    found = [name for name in members if name.endswith("/data.pkl")]
    if len(found) != 1:
        raise ValueError("it is a zip archive without a PyTorch state dict")
    root = found[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in members:
        raise ValueError("it is a TorchScript program; expected a state dict")
    order = members.get(f"{root}byteorder")
    if order is not None and bytes(data[order.first : order.first + 3]) != b"lit":
        raise ValueError("its values are big-endian; expected little-endian")
    pickle = members[found[0]]
    value = read_pickle(data[: pickle.first + pickle.size], pickle.first, _KNOWN).value
    prefix = f"{root}data/"
    storages = {
        name.removeprefix(prefix): member
        for name, member in members.items()
        if name.startswith(prefix)
    }
    return _state_dict(value, storages, len(data))


def legacy_numbers(data: memoryview) -> dict[object, object]:
    """Read the state dict of a `.pth` file from before PyTorch 1.6.

    Args:
        data: The file.

    Returns:
        As `zip_numbers`.

    Raises:
        ValueError: As `zip_numbers`.
    """
    magic = read_pickle(data, 0, _KNOWN)
    if magic.value != _MAGIC:
        raise ValueError("it is a pickle, but not of PyTorch; expected a state dict")
    version = read_pickle(data, magic.end, _KNOWN)
    system = read_pickle(data, version.end, _KNOWN)
    if isinstance(system.value, dict) and not system.value.get("little_endian", True):
        raise ValueError("its values are big-endian; expected little-endian")
    content = read_pickle(data, system.end, _KNOWN)
    keys = read_pickle(data, content.end, _KNOWN)
    return _state_dict(content.value, _in_turn(data, keys, content.stored), len(data))


def _in_turn(data: memoryview, keys: Pickle, stored: list[PersistentId]) -> dict[str, ZipMember]:
    """Find the storages after the list of their keys, each preceded by its number of elements."""
    try:
        described = {key: (dtype, count) for key, dtype, count in map(_described, stored)}
    except ValueError as error:
        raise ValueError(f"one of its tensors {error}; expected plain tensors") from None
    names = keys.value if isinstance(keys.value, list) else []
    if len(names) != len(described):
        raise ValueError(f"it lists {len(names)} storages but uses {len(described)}")
    found: dict[str, ZipMember] = {}
    at = keys.end
    for name in names:
        if not isinstance(name, str) or name in found or name not in described:
            raise ValueError(f"its storage {shown(name)} belongs to no tensor")
        dtype, count = described[name]
        size = count * dtype.itemsize
        if at + 8 + size > len(data) or struct.unpack_from("<q", data, at)[0] != count:
            raise ValueError(f"its storage {shown(name)} is incomplete; expected {size} bytes")
        found[name] = ZipMember(at + 8, size)
        at += 8 + size
    return found


def _state_dict(
    value: object, storages: Mapping[str, ZipMember], size: int
) -> dict[object, object]:
    """Return the state dict in the content of a file: the content itself, or one entry of it."""
    for key in ("state_dict", "model", "vae"):
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    if not isinstance(value, dict):
        kind = "Tensor" if isinstance(value, PickleCall) else type(value).__name__
        raise ValueError(f"it holds a {kind}; expected a state dict")
    state: dict[object, object] = {}
    total = 0
    for key, entry in value.items():
        if isinstance(entry, PickleCall):
            try:
                entry = _numbers(entry, storages)
            except ValueError as error:
                raise ValueError(f"{shown(key)} {error}") from None
            total += prod(entry.shape) * entry.dtype.itemsize
        state[key] = entry
    if total > size + _MAX_SHARED:
        raise ValueError(f"its tensors need {total} bytes; the file has {size}")
    return state


def _numbers(call: PickleCall, storages: Mapping[str, ZipMember]) -> Numbers:
    """Return the place of a tensor from the call that would create it."""
    call = _unwrapped(call)
    if call.name in _OTHER_TENSORS:
        raise ValueError(f"is {_OTHER_TENSORS[call.name]}; expected a plain tensor")
    if call.name not in _TENSORS or len(call.arguments) < 4:
        raise ValueError(f"is a {call.name}; expected a tensor")
    stored, offset, shape, stride, *more = call.arguments
    key, dtype, member = _storage(stored, storages)
    if call.name.endswith("_v3") and len(more) > 2 and isinstance(more[2], PickleGlobal):
        dtype = _DTYPES.get(more[2].name, dtype)
    if any(isinstance(each, dict) and each for each in more):
        raise ValueError("is a conjugate or negative view, or has hooks; expected a plain tensor")
    if not _are_sizes(shape) or not _are_sizes(stride) or not _are_sizes((offset,)):
        raise ValueError("has no valid shape")
    numbers = Numbers(member.first, offset, dtype, shape, stride)
    if len(shape) != len(stride) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"has {len(shape)} dimensions and {len(stride)} strides")
    if not prod(shape):
        raise ValueError(f"is {list(shape)}; expected no size of 0")
    if prod(shape) > numbers.reach:
        raise ValueError(f"is {list(shape)}, but has only {numbers.reach} values")
    if (offset + numbers.reach) * dtype.itemsize > member.size:
        raise ValueError(f"is {list(shape)}; its storage {shown(key)} has {member.size} bytes")
    return numbers


def _unwrapped(call: PickleCall) -> PickleCall:
    """Return the call that creates the tensor, without the calls that wrap it in a parameter."""
    for _ in range(4):
        if call.name == _FROM_TYPE and len(call.arguments) > 2:
            function, _, arguments = call.arguments[:3]
            if not isinstance(function, PickleGlobal) or not isinstance(arguments, tuple):
                break
            call = PickleCall(function.name, arguments)
        elif call.name in _WRAPPERS and call.arguments:
            if not isinstance(call.arguments[0], PickleCall):
                break
            call = call.arguments[0]
        else:
            break
    return call


def _storage(
    stored: object, storages: Mapping[str, ZipMember]
) -> tuple[str, torch.dtype, ZipMember]:
    """Return key, dtype and place of a storage."""
    key, dtype, count = _described(stored)
    if key not in storages:
        raise ValueError(f"has its data in storage {shown(key)}, which is not in the file")
    member = storages[key]
    if count * dtype.itemsize > member.size:
        raise ValueError(f"has {count} values; its storage {shown(key)} has {member.size} bytes")
    return key, dtype, ZipMember(member.first, count * dtype.itemsize)


def _described(stored: object) -> tuple[str, torch.dtype, int]:
    """Return key, dtype and number of elements of a storage from its description in a pickle."""
    place = stored.place if isinstance(stored, PersistentId) else None
    if not isinstance(place, tuple) or len(place) not in (5, 6) or place[0] != "storage":
        raise ValueError("has no storage")
    _, kind, key, _, count, *view = place
    dtype = _STORAGE_TYPES.get(kind.name) if isinstance(kind, PickleGlobal) else None
    if dtype is None or not isinstance(key, str) or not _are_sizes((count,)):
        unknown = f" ({kind.name})" if isinstance(kind, PickleGlobal) else ""
        raise ValueError(f"has a storage of unknown type{unknown}")
    if view and view[0] is not None:
        raise ValueError("uses a view of a storage; expected a whole storage")
    return key, dtype, count


def _are_sizes(value: object) -> bool:
    """Return whether `value` is a tuple of integers in the range of sizes."""
    return isinstance(value, tuple) and all(type(v) is int and 0 <= v < 1 << 48 for v in value)
