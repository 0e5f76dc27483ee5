"""What backends with kernels of their own ask of tensors, and the reasons why they refuse them.

Frames are dense blocks of `H * W` rows of `C` numbers, at any distance in batch and time; rows of
`[..., C]` are at one distance; and a result is written over what it is made of only in place.
"""

import torch
from torch import Tensor

from .errors import Refusal

# What the kernels compute on, in float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuse_dtype(x: Tensor) -> None:
    """Refuse a dtype that the kernels do not read and write."""
    if x.dtype not in DTYPES:
        raise Refusal(f"there is no kernel for {str(x.dtype).removeprefix('torch.')}")


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Refuse what autograd would record."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise Refusal("autograd records, and these kernels have no gradient")


def refuse_videos(**tensors: Tensor | None) -> None:
    """Refuse what is not `[B, C, T, H, W]` with dense channels-last frames."""
    for name, x in tensors.items():
        if x is not None and not is_dense(x, 3, 4, 1):
            raise Refusal(f"{name} is not channels-last")


def refuse_window(x: Tensor, tail: Tensor | None, out: Tensor | None) -> None:
    """Refuse a causal convolution's input where a part of it would be written over another."""
    refuse_videos(x=x, tail=tail, out=out)
    refuse_overlap(out, x=x, tail=tail, same=tail is None)
    refuse_overlap(tail, x=x)


def refuse_subclass(x: Tensor) -> None:
    """Refuse what is no plain tensor, and may have no memory."""
    if type(x) not in (Tensor, torch.nn.Parameter):
        raise Refusal(f"x is a {type(x).__name__}, which may have no memory")


def refuse_old_bfloat16(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse bfloat16 on an NVIDIA GPU that does not compute in it."""
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise Refusal(f"bfloat16 needs compute capability 8.0; this GPU has {major}.{minor}")


def refuse_rows(**tensors: Tensor | None) -> None:
    """Refuse what is not rows of numbers at one distance."""
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
                    raise Refusal(f"the rows of {name} are not at one distance")
                expected = stride * size


def refuse_overlap(target: Tensor | None, *, same: bool = False, **sources: Tensor | None) -> None:
    """Refuse a target in the memory of what is read; with `same` it may be the very tensor."""
    if type(target) is not Tensor:  # a subclass (a fake tensor, say) may have no address
        return
    memory = target.untyped_storage().data_ptr()
    for name, source in sources.items():
        if source is None or (same and source is target) or not memory:
            continue
        if source.untyped_storage().data_ptr() != memory:
            continue
        first, last = _extent(target)
        start, stop = _extent(source)
        if first < stop and start < last:
            if same and first == start and target.stride() == source.stride():
                continue
            raise Refusal(f"the result would be written over {name}")


def is_dense(x: Tensor, *dims: int) -> bool:
    """Whether dimensions are one run of numbers, the last the fastest."""
    shape, strides, run = x.shape, x.stride(), 1
    for dim in reversed(dims):
        size = shape[dim]
        if size != 1:
            if strides[dim] != run and x.numel():
                return False
            run *= size
    return True


def row_distance(x: Tensor) -> int:
    """Numbers from one row of `[..., C]` to the next, of what `refuse_rows` lets through."""
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1:
            return stride
    return x.shape[-1]


def _extent(x: Tensor) -> tuple[int, int]:
    """First and last address of the memory of a tensor."""
    first = x.data_ptr()
    if not x.numel():
        return first, first
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return first, first + (span + 1) * x.element_size()
