"""The memory that our own kernels can read and write; other tensors are refused, for all backends.

Frames are dense blocks of `H * W` rows of `C` elements, with any stride in batch and time. Rows of
`[..., C]` have one common stride. A result overlaps its inputs only in place.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backends import SIGNATURES
from .devices import device_kind
from .errors import Refusal

# Dtypes of the activations; the kernels compute in float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Dtypes of images on a GPU.
IMAGE_DTYPES = (*DTYPES, torch.uint8, torch.uint16)


def refuse_dtype(x: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Refuse a dtype that the kernels do not support."""
    if x.dtype not in dtypes:
        raise Refusal(f"there is no kernel for {str(x.dtype).removeprefix('torch.')}")


def refuse_video(name: str, x: Tensor) -> None:
    """Refuse the video `name` whose frames are not dense channels-last memory."""
    # The usual case takes one call.
    if x.is_contiguous(memory_format=torch.channels_last_3d) or is_dense(x, 3, 4, 1):
        return
    raise Refusal(f"{name} is not channels-last")


# Why descriptors, also called tensor maps, do not describe a video.
UNDESCRIBED = "descriptors need memory at multiples of 16 bytes, and videos of whole frames"


def described_strides(x: Tensor) -> list[int] | None:
    """Return the strides of `x` `[B, C, T, H, W]` in the order B, T, H, W, C for a descriptor."""
    # Addresses are multiples of 16 bytes, and each stride is a multiple of the next one ("CUDA
    # driver API", `cuTensorMapEncodeTiled`). The strides of lengths of one are arbitrary. None:
    # there is no descriptor.
    batches, channels, frames, height, width = x.shape
    plane = height * width * channels
    frame = x.stride(2) if frames > 1 else plane
    batch = x.stride(0) if batches > 1 else frames * frame
    whole = frame >= plane and frame % plane == 0 and batch >= frame and batch % frame == 0
    aligned = channels * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return [batch, frame, width * channels, channels, 1] if whole and aligned else None


def refuse_subclass(x: Tensor) -> None:
    """Refuse tensor subclasses, which may have no memory."""
    if type(x) not in (Tensor, torch.nn.Parameter):
        raise Refusal(f"x is a {type(x).__name__}, which may have no memory")


def refuse_old_bfloat16(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse bfloat16 on an NVIDIA GPU that does not compute in it."""
    if dtype == torch.bfloat16 and device_kind(device) == "nvidia":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise Refusal(f"bfloat16 needs compute capability 8.0; this GPU has {major}.{minor}")


def refuse_rows(name: str, x: Tensor) -> None:
    """Refuse the tensor `name` `[..., C]` whose rows do not have one common stride."""
    if x.is_contiguous():
        return
    shape, strides = x.shape, x.stride()
    if shape[-1] != 1 and strides[-1] != 1:
        raise Refusal(f"the last dimension of {name} is not dense")
    expected = None
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size != 1:
            if expected is not None and stride != expected:
                raise Refusal(f"the rows of {name} have no common stride")
            expected = stride * size


def refuse_target(out: Tensor, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse a buffer on another device than `x` `[...]`, or in another dtype than `dtypes`."""
    if out.device != x.device:
        raise Refusal("out is on another device")
    refuse_dtype(out, dtypes)


def refuse_overlap(target: Tensor | None, *, same: bool = False, **sources: Tensor | None) -> None:
    """Refuse a target over the memory of a source; `same` allows the target itself."""
    for name, source in sources.items():
        if overlaps(target, source, same=same):
            raise Refusal(f"out overlaps the memory of {name}")


def overlaps(target: Tensor | None, source: Tensor | None, *, same: bool = False) -> bool:
    """Return whether two tensors share memory; `same` does not count the target itself."""
    # Subclasses, such as fake tensors, may have no address: they share nothing.
    if target is None or source is None or (same and source is target):
        return False
    if not _has_address(target) or not _has_address(source) or target.device != source.device:
        return False
    # Only on the host two storages can share memory.
    storages = target.untyped_storage(), source.untyped_storage()
    if target.device.type != "cpu" and storages[0].data_ptr() != storages[1].data_ptr():
        return False
    first, last = _extent(target)
    start, stop = _extent(source)
    if first >= stop or start >= last:
        return False
    in_place = first == start and target.stride() == source.stride()
    return not (same and in_place and target.dtype == source.dtype)


def is_dense(x: Tensor, *dims: int) -> bool:
    """Return whether the dimensions `dims` of `x` `[...]` are contiguous, the last one fastest."""
    shape, strides, run = x.shape, x.stride(), 1
    for dim in reversed(dims):
        size = shape[dim]
        if size != 1:
            if strides[dim] != run and x.numel():
                return False
            run *= size
    return True


def row_distance(x: Tensor) -> int:
    """Return the elements from one row of `x` `[..., C]` to the next, after `refuse_rows`."""
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1:
            return stride
    return x.shape[-1]


def _has_address(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the first and last address of the memory of a tensor."""
    first = x.data_ptr()
    if not x.numel():
        return first, first
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return first, first + (span + 1) * x.element_size()


def dense(values: Tensor | None, x: Tensor) -> Any:  # noqa: ANN401, None for None
    """Return `C` values as all kernels read them: dense, in float32 or in the dtype of `x`."""
    if values is None:
        return None
    if values.dtype not in (torch.float32, x.dtype):
        values = values.float()
    return values if values.is_contiguous() else values.contiguous()


# The arguments that hold activations, other than `out`.
_ACTIVATIONS = ("x", "grid", "frames", "source", "tail", "residual", "gate")

# By op: the places of its activations and of `out` among its arguments.
_PLACES = {
    op: ([at for at, name in enumerate(names) if name in _ACTIVATIONS], names.index("out"))
    for op, names in SIGNATURES.items()
    if "out" in names
}

# Ops that can write over an input, those whose result can have any strides, and rows.
_OVER = ("bias_residual", "silu_mul")
_ANYWHERE = ("frames_to_images", "pixel_shuffle_3d", "group_norm_statistics")


def refuse_memory(op: str, args: Sequence[Any]) -> None:
    """Refuse the memory of a call of `op` with the arguments of its launches."""
    if op not in _PLACES:
        return
    names, (places, at) = SIGNATURES[op], _PLACES[op]
    out, same = args[at], op in _OVER
    refuse = refuse_rows if op == "silu_mul" else refuse_video
    for place in places if op in _ANYWHERE else (*places, at):
        if args[place] is not None:
            refuse(names[place], args[place])
    if "saturated" in names:
        x, tail, border = args[0], args[at - 1], args[-1]
        if args[at + 2] is not None and not args[at + 2].is_contiguous():
            raise Refusal("the numbers of saturated are not adjacent")
        if border and not x.numel():
            raise Refusal("the tensor is empty")
        if tail is not None:
            refuse_overlap(tail, x=x)
        same = tail is None and not border and out.dtype == x.dtype
    for place in places:
        over = same or (names[place] == "residual" and "weight" in names)
        if args[place] is not None and overlaps(out, args[place], same=over):
            raise Refusal(f"out overlaps the memory of {names[place]}")
