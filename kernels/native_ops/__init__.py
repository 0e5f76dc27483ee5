"""The ops in C++ for the CPU; `csrc/cpu` has the kernels and `library.py` builds them.

Each function says in its first lines what it does not take. What it takes is one op of
`torch.ops.fast_video_vae`, which writes into `out`.
"""

from typing import NoReturn

import torch
from torch import Tensor

from .. import shapes
from ..constraints import (
    is_dense,
    refuse_dtype,
    refuse_gradients,
    refuse_overlap,
    refuse_rows,
    refuse_videos,
    refuse_window,
)
from ..errors import Refusal
from .library import CPU


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
    refuse_window(x, tail, out)
    CPU.load()
    out = shapes.new_window(x, tail) if out is None else out
    torch.ops.fast_video_vae.rms_norm_silu.default(
        x, _vector(gamma), silu, _vector(bias), tail, out
    )
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
    _check(x, weight, bias, statistics)
    refuse_window(x, tail, out)
    CPU.load()
    out = shapes.new_window(x, tail) if out is None else out
    given = None if statistics is None else statistics.contiguous()
    torch.ops.fast_video_vae.group_norm_silu.default(
        x, _vector(weight), _vector(bias), groups, eps, silu, given, tail, out
    )
    return out


def group_norm_statistics(x: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """Measure each frame over its pixels and each group of channels."""
    _check(x)
    refuse_videos(x=x)
    CPU.load()
    out = torch.empty(shapes.statistics(x, groups), dtype=torch.float32, device=x.device)
    torch.ops.fast_video_vae.group_norm_statistics.default(x, groups, eps, out)
    return out


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """SiLU of one tensor times another: `x * sigmoid(x) * gate`."""
    _check(x, gate)
    refuse_rows(x=x, gate=gate, out=out)
    refuse_overlap(out, x=x, gate=gate, same=True)
    CPU.load()
    out = x.new_empty(x.shape) if out is None else out
    torch.ops.fast_video_vae.silu_mul.default(x, gate, out)
    return out


def bias_residual(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add what a convolution without bias leaves to add, in one pass."""
    _check(x, bias, residual, residual_bias)
    refuse_videos(x=x, residual=residual, out=out)
    refuse_overlap(out, x=x, residual=residual, same=True)
    CPU.load()
    out = shapes.new_video(x, x.shape) if out is None else out
    torch.ops.fast_video_vae.bias_residual.default(
        x, _vector(bias), residual, _vector(residual_bias), out
    )
    return out


def attention(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    """Single-head attention: PyTorch's own kernel is as good."""
    raise Refusal("PyTorch's own fused kernel serves the CPU")


def interleave_time(x: Tensor, phases: int, *, out: Tensor | None = None) -> Tensor:
    """Spread the temporal phases in the channels over frames."""
    _check(x)
    refuse_videos(x=x, out=out)
    refuse_overlap(out, x=x)
    CPU.load()
    out = shapes.new_video(x, shapes.interleaved(x, phases)) if out is None else out
    torch.ops.fast_video_vae.interleave_time.default(x, phases, out)
    return out


def merge_phases(
    grid: Tensor,
    source: Tensor | None = None,
    times: int = 1,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Merge the four phases of a folded upsampling convolution into one picture."""
    _check(grid, source, bias)
    refuse_videos(grid=grid, source=source, out=out)
    refuse_overlap(out, grid=grid, source=source)
    CPU.load()
    out = shapes.new_video(grid, shapes.merged(grid)) if out is None else out
    torch.ops.fast_video_vae.merge_phases.default(grid, source, times, _vector(bias), out)
    return out


def pixel_shuffle_3d(
    x: Tensor, size: tuple[int, int, int], order: str = "cthw", *, out: Tensor | None = None
) -> Tensor:
    """Turn parts of the channels into frames, rows and columns."""
    _check(x)
    if out is not None and (out.dtype != x.dtype or out.device != x.device):
        raise Refusal("out is of another dtype or device")
    refuse_videos(x=x, out=out)
    refuse_overlap(out, x=x)
    CPU.load()
    out = shapes.new_video(x, shapes.shuffled(x, size)) if out is None else out
    torch.ops.fast_video_vae.pixel_shuffle_3d.default(x, size, order, out)
    return out


def average_down(x: Tensor, channels: int, *, times: int, size: int) -> Tensor:
    """Average what falls on one number of a smaller video."""
    _check(x)
    refuse_videos(x=x)
    CPU.load()
    out = shapes.new_video(x, shapes.averaged(x, channels, times, size))
    torch.ops.fast_video_vae.average_down.default(x, times, size, out)
    return out


def frames_to_images(
    frames: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    patch: int = 1,
    order: str = "cthw",
    out: Tensor | None = None,
) -> Tensor:
    """Turn decoded frames into images."""
    _check(frames)
    if out is not None:
        dtype = out.dtype
        if out.device != frames.device:
            raise Refusal("out is on another device")
        if not is_dense(out, -3, -2, -1):
            raise Refusal("the pixels of out are not dense")
    if dtype not in (torch.float32, torch.uint8):
        raise Refusal("images are neither float32 nor uint8")
    refuse_videos(frames=frames)
    refuse_overlap(out, frames=frames)
    CPU.load()
    if out is None:
        out = torch.empty(shapes.images(frames, patch), dtype=dtype, device=frames.device)
    torch.ops.fast_video_vae.frames_to_images.default(frames, patch, order, out)
    return out


def _check(x: Tensor, *others: Tensor | None) -> None:
    """Refuse devices, dtypes and gradients that are not ours; `others` share the device."""
    if x.device.type not in ("cpu", "meta"):
        raise Refusal(f"the tensors are on {x.device.type}; native is for the CPU")
    refuse_dtype(x)
    refuse_gradients(x, *others)


def _vector(values: Tensor | None) -> Tensor | None:
    """Parameters as the kernels read them: dense float32."""
    return None if values is None else values.float().contiguous()
