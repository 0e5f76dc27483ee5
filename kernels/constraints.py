"""Checks for backends with their own kernels, which refuse tensors that they cannot read.

Frames are dense blocks of `H * W` rows of `C` elements, with any stride in batch and time. Rows of
`[..., C]` have one common stride. A result overlaps its inputs only in place.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import shapes
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


def refuse_videos(**tensors: Tensor | None) -> None:
    """Refuse videos whose frames are not dense channels-last memory; None is skipped."""
    for name, x in tensors.items():
        if x is not None and not is_dense(x, 3, 4, 1):
            raise Refusal(f"{name} is not channels-last")


class NormWindow(NamedTuple):
    """What a norm writes; see `rms_norm_silu` in `kernels/__init__.py`."""

    tail: Tensor | None
    out: Tensor
    border: int
    codes: Tensor | None
    saturated: Tensor | None


def window_of(
    x: Tensor,
    tail: Tensor | None = None,
    out: Tensor | None = None,
    border: int = 0,
    codes: Tensor | None = None,
    saturated: Tensor | None = None,
) -> NormWindow:
    """Return what a norm writes, with memory for it, or refuse other layouts and overlaps."""
    refuse_videos(x=x, tail=tail, out=out)
    # Only without tail and border, and in the dtype of `x`, `out` can be `x`.
    same = out is not None and tail is None and not border and out.dtype == x.dtype
    refuse_overlap(out, x=x, tail=tail, same=same)
    refuse_overlap(tail, x=x)
    if saturated is not None and not saturated.is_contiguous():
        raise Refusal("the numbers of saturated are not adjacent")
    if border and not x.numel():
        raise Refusal("the tensor is empty")
    if out is None:
        out = shapes.new_window(x, tail, border, coded=codes is not None)
    return NormWindow(tail, out, border, codes, saturated)


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


def refuse_rows(**tensors: Tensor | None) -> None:
    """Refuse tensors `[..., C]` whose rows do not have one common stride; None is skipped."""
    for name, x in tensors.items():
        if x is None or x.is_contiguous():
            continue
        shape, strides = x.shape, x.stride()
        if shape[-1] != 1 and strides[-1] != 1:
            raise Refusal(f"the last dimension of {name} is not dense")
        expected = None
        for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
            if size != 1:
                if expected is not None and stride != expected:
                    raise Refusal(f"the rows of {name} have no common stride")
                expected = stride * size


def refuse_overlap(target: Tensor | None, *, same: bool = False, **sources: Tensor | None) -> None:
    """Refuse a target over the memory of a source; `same` allows the target itself."""
    for name, source in sources.items():
        if overlaps(target, source, same=same):
            raise Refusal(f"out overlaps the memory of {name}")


def refuse_convolved(
    x: Tensor, out: Tensor, *, tail: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """Refuse memory of a convolution that is not dense, or that the result overlaps."""
    refuse_videos(x=x, tail=tail, residual=residual, out=out)
    refuse_overlap(out, x=x, tail=tail)
    refuse_overlap(out, residual=residual, same=True)


def video_target(
    shape: shapes.Shape, out: Tensor | None, *, same: bool = False, **sources: Tensor | None
) -> Tensor:
    """Return `out` or channels-last memory like the first source, or refuse their memory."""
    refuse_videos(**sources, out=out)
    refuse_overlap(out, same=same, **sources)
    like = next(each for each in sources.values() if each is not None)
    return shapes.new_video(like, shape) if out is None else out


def refuse_target(out: Tensor | None, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse a buffer on another device, in another dtype, or over the memory of `x`."""
    if out is None:
        return
    if out.device != x.device:
        raise Refusal("out is on another device")
    if out.dtype not in dtypes:
        raise Refusal(f"there is no kernel for out in {str(out.dtype).removeprefix('torch.')}")
    refuse_overlap(out, x=x)


def image_target(
    frames: Tensor, dtype: torch.dtype, patch: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return memory for images that a GPU writes, and a view of it as `[B, C, T, H, W]`."""
    refuse_videos(frames=frames)
    if out is None:
        out = frames.new_empty(shapes.images(frames, patch), dtype=dtype)
    refuse_target(out, frames, IMAGE_DTYPES)
    video = out if out.ndim == 5 else out.unflatten(0, (frames.shape[0], frames.shape[2]))
    return out, video.movedim(-1, 1)


def overlaps(target: Tensor | None, source: Tensor | None, *, same: bool = False) -> bool:
    """Return whether two tensors share memory; `same` does not count the target itself."""
    # Subclasses, such as fake tensors, may have no address: they share nothing.
    if target is None or source is None or (same and source is target):
        return False
    if not _has_address(target) or not _has_address(source) or target.device != source.device:
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
