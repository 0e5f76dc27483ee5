"""Norms and gates in CUDA C++ for NVIDIA GPUs; `csrc/cuda` has the kernels.

Each function first refuses calls that it does not support, then calls one op of
`torch.ops.fast_video_vae_cuda`, which writes into `out` on PyTorch's current stream. Nothing is
built or loaded before a call reaches this backend.
"""

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .. import shapes
from ..backends import forced
from ..constraints import (
    refuse_border,
    refuse_dtype,
    refuse_gradients,
    refuse_old_bfloat16,
    refuse_overlap,
    refuse_rows,
    refuse_subclass,
    refuse_videos,
    refuse_window,
)
from ..errors import Refusal
from .library import CUDA

# Most frames and videos of a call: blocks of a grid in its second and third dimension.
_GRID_LIMIT = 65535

# Pixels and rows are counted in 31 bits; channels have one bit less for sums with an offset.
_COUNT_LIMIT = 2**31
_CHANNEL_LIMIT = 2**30


def rms_norm_silu(
    x: Tensor,
    gamma: Tensor,
    *,
    silu: bool = True,
    bias: Tensor | None = None,
    tail: Tensor | None = None,
    out: Tensor | None = None,
    border: int = 0,
) -> Tensor:
    """Run `rms_norm_silu(x, gamma, silu, bias, tail, out, border)`; `x` is `[B, C, T, H, W]`."""
    _check(x, gamma, bias)
    _refuse_sizes(x)
    refuse_border(border)
    refuse_window(x, tail, out)
    CUDA.load()
    out = shapes.new_window(x, tail) if out is None else out
    _start("rms_norm_silu", x, _vector(gamma, x), silu, _vector(bias, x), tail, out)
    return out


def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    *,
    eps: float = 1e-6,
    silu: bool = True,
    statistics: Tensor | None = None,
    tail: Tensor | None = None,
    out: Tensor | None = None,
    border: int = 0,
) -> Tensor:
    """Compute `group_norm_silu(x, weight, bias, groups, eps, silu, statistics, tail, out)`.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        weight: `[C]`.
        bias: `[C]`.
        groups: Number of groups.
        eps: Added to the variance.
        silu: Apply SiLU.
        statistics: `[B, T, 2, groups]`, or None.
        tail: `[B, C, K, H, W]`, or None.
        out: `[B, C, K + T, H, W]`, or None.
        border: 0; others are refused.

    Returns:
        `[B, C, K + T, H, W]`.

    Raises:
        Refusal: There is a border, or the kernels do not support the call.
    """
    _check(x, weight, bias)
    _refuse_sizes(x)
    refuse_border(border)
    refuse_window(x, tail, out)
    CUDA.load()
    out = shapes.new_window(x, tail) if out is None else out
    scale, offset = _vector(weight, x), _vector(bias, x)
    given = None if statistics is None else statistics.contiguous()
    _start("group_norm_silu", x, scale, offset, groups, eps, silu, given, tail, out)
    return out


def group_norm_statistics(x: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """Compute `group_norm_statistics(x, groups, eps)` for `x` `[B, C, T, H, W]`."""
    _check(x)
    refuse_videos(x=x)
    _refuse_sizes(x)
    CUDA.load()
    out = torch.empty(shapes.statistics(x, groups), dtype=torch.float32, device=x.device)
    _start("group_norm_statistics", x, groups, eps, out)
    return out


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute `silu_mul(x, gate, out)` for `x` `[..., C]`."""
    _check(x, gate)
    refuse_rows(x=x, gate=gate, out=out)
    _refuse_counts(x, x.shape[-1])
    refuse_overlap(out, x=x, gate=gate, same=True)
    CUDA.load()
    out = x.new_empty(x.shape) if out is None else out
    _start("silu_mul", x, gate, out)
    return out


def _check(x: Tensor, *others: Tensor | None) -> None:
    """Refuse devices, dtypes and gradients that the kernels do not support."""
    _refuse_device(x.device, x.dtype)
    refuse_dtype(x)
    refuse_subclass(x)
    refuse_gradients(x, *others)


def _refuse_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse devices other than NVIDIA GPUs that support the dtype."""
    if device.type != "cuda":
        raise Refusal(f"the tensors are on {device.type}; cuda needs a GPU")
    if torch.version.hip is not None:
        raise Refusal("this PyTorch is for AMD GPUs; cuda needs an NVIDIA GPU")
    if forced() != "cuda" and os.environ.get("FAST_VIDEO_VAE_CUDA") != "1":
        raise Refusal("not yet measured on a GPU; FAST_VIDEO_VAE_CUDA=1 enables it")
    refuse_old_bfloat16(device, dtype)


def _refuse_sizes(x: Tensor) -> None:
    """Refuse empty tensors, and more frames, videos or pixels than a grid counts."""
    _refuse_counts(x, x.shape[1])
    if x.shape[0] > _GRID_LIMIT or x.shape[2] > _GRID_LIMIT:
        raise Refusal(f"more than {_GRID_LIMIT} frames or videos")


def _refuse_counts(x: Tensor, channels: int) -> None:
    """Refuse empty tensors, and more rows or channels than the kernels count."""
    if not x.numel():
        raise Refusal("the tensor is empty")
    if x.numel() // channels >= _COUNT_LIMIT or channels >= _CHANNEL_LIMIT:
        raise Refusal("more rows or channels than 31 bits count")


def _start(op: str, x: Tensor, *arguments: object) -> None:
    """Run an op of the library on the current stream of the device of `x`."""
    with _entered(x.device):
        run = getattr(torch.ops.fast_video_vae_cuda, op).default
        run(x, *arguments, _stream(x.device))


def _entered(device: torch.device) -> AbstractContextManager[object]:
    """Make the device of the tensors current, which a launch needs."""
    return (
        nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)
    )


def _stream(device: torch.device) -> int:
    """Return the handle of PyTorch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream


def _vector(values: Tensor | None, x: Tensor) -> Tensor | None:
    """Return parameters dense, in float32 or in the dtype of `x`, for the kernels."""
    if values is None:
        return None
    return (values if values.dtype in (torch.float32, x.dtype) else values.float()).contiguous()
