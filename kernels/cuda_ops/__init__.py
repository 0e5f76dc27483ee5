"""Norms and gates in CUDA C++ for NVIDIA GPUs; `csrc/cuda` has the kernels.

Each function says in its first lines what it does not take. What it takes is one op of
`torch.ops.fast_video_vae_cuda`, which writes into `out` on PyTorch's current stream. Nothing is
built, nor looked for, before somebody asks for this backend.
"""

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .. import shapes
from ..backends import forced
from ..constraints import (
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

# A grid has no more blocks than this for frames and for videos.
_GRID_LIMIT = 65535

# Pixels and rows are counted in 31 bits, and so are channels and what is added to them.
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
) -> Tensor:
    """Normalise each pixel over its channels, scale, and apply SiLU."""
    _check(x, gamma, bias)
    _refuse_sizes(x)
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
) -> Tensor:
    """Normalise each frame over its pixels and each group of channels, and apply SiLU."""
    _check(x, weight, bias)
    _refuse_sizes(x)
    refuse_window(x, tail, out)
    CUDA.load()
    out = shapes.new_window(x, tail) if out is None else out
    scale, offset = _vector(weight, x), _vector(bias, x)
    given = None if statistics is None else statistics.contiguous()
    _start("group_norm_silu", x, scale, offset, groups, eps, silu, given, tail, out)
    return out


def group_norm_statistics(x: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """What `group_norm_silu` measures of each frame and group."""
    _check(x)
    refuse_videos(x=x)
    _refuse_sizes(x)
    CUDA.load()
    out = torch.empty(shapes.statistics(x, groups), dtype=torch.float32, device=x.device)
    _start("group_norm_statistics", x, groups, eps, out)
    return out


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """SiLU of one tensor times another: `x * sigmoid(x) * gate`."""
    _check(x, gate)
    refuse_rows(x=x, gate=gate, out=out)
    _refuse_counts(x, x.shape[-1])
    refuse_overlap(out, x=x, gate=gate, same=True)
    CUDA.load()
    out = x.new_empty(x.shape) if out is None else out
    _start("silu_mul", x, gate, out)
    return out


def _check(x: Tensor, *others: Tensor | None) -> None:
    """Refuse devices, dtypes and gradients that are not ours."""
    _refuse_device(x.device, x.dtype)
    refuse_dtype(x)
    refuse_subclass(x)
    refuse_gradients(x, *others)


def _refuse_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse what is not on an NVIDIA GPU that has the dtype."""
    if device.type != "cuda":
        raise Refusal(f"the tensors are on {device.type}; cuda is for GPUs")
    if torch.version.hip is not None:
        raise Refusal("this PyTorch is for AMD's GPUs; cuda is for NVIDIA's")
    if forced() != "cuda" and os.environ.get("FAST_VIDEO_VAE_CUDA") != "1":
        raise Refusal("it waits for its first run on a GPU; FAST_VIDEO_VAE_CUDA=1 switches it on")
    refuse_old_bfloat16(device, dtype)


def _refuse_sizes(x: Tensor) -> None:
    """Refuse what is empty, and more frames, videos or pixels than a grid counts."""
    _refuse_counts(x, x.shape[1])
    if x.shape[0] > _GRID_LIMIT or x.shape[2] > _GRID_LIMIT:
        raise Refusal(f"there are more than {_GRID_LIMIT} frames or videos")


def _refuse_counts(x: Tensor, channels: int) -> None:
    """Refuse what is empty, and more rows or channels than the kernels count."""
    if not x.numel():
        raise Refusal("there is nothing to do")
    if x.numel() // channels >= _COUNT_LIMIT or channels >= _CHANNEL_LIMIT:
        raise Refusal("there are more rows or channels than 31 bits count")


def _start(op: str, x: Tensor, *arguments: object) -> None:
    """Run an op of the library on the current stream of the device of `x`."""
    with _entered(x.device):
        run = getattr(torch.ops.fast_video_vae_cuda, op).default
        run(x, *arguments, _stream(x.device))


def _entered(device: torch.device) -> AbstractContextManager[object]:
    """The device of the tensors is the current one, as a launch wants it."""
    return (
        nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)
    )


def _stream(device: torch.device) -> int:
    """The handle of PyTorch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream


def _vector(values: Tensor | None, x: Tensor) -> Tensor | None:
    """Parameters as the kernels read them: dense, in float32 or in the dtype of `x`."""
    if values is None:
        return None
    return (values if values.dtype in (torch.float32, x.dtype) else values.float()).contiguous()
