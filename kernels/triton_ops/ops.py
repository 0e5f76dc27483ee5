"""The ops of the contract, as far as Triton does them: what they refuse, and their results.

Each function says in its first lines what it does not take. Then the kernels are imported.
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor

from .. import shapes
from ..constraints import (
    DTYPES,
    refuse_dtype,
    refuse_gradients,
    refuse_overlap,
    refuse_rows,
    refuse_subclass,
    refuse_videos,
    refuse_window,
)
from ..errors import Refusal
from .runtime import refuse_device, require
from .tiles import refuse_sizes


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
    refuse_sizes(x)
    refuse_window(x, tail, out)
    kernels = _kernels("rows", x)
    out = shapes.new_window(x, tail) if out is None else out
    kernels.rms_norm_silu(x, gamma, silu, bias, tail, out)
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
    refuse_sizes(x)
    refuse_window(x, tail, out)
    kernels = _kernels("group_norm", x)
    out = shapes.new_window(x, tail) if out is None else out
    kernels.group_norm_silu(x, weight, bias, groups, eps, silu, statistics, tail, out)
    return out


def group_norm_statistics(x: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """Measure each frame over its pixels and each group of channels."""
    _check(x)
    refuse_videos(x=x)
    refuse_sizes(x)
    return _kernels("group_norm", x).group_norm_statistics(x, groups, eps)


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """SiLU of one tensor times another: `x * sigmoid(x) * gate`."""
    _check(x, gate)
    refuse_rows(x=x, gate=gate, out=out)
    if not x.numel():
        raise Refusal("there is nothing to do")
    refuse_overlap(out, x=x, gate=gate, same=True)
    kernels = _kernels("rows", x)
    out = x.new_empty(x.shape) if out is None else out
    kernels.silu_mul(x, gate, out)
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
    refuse_sizes(x)
    refuse_overlap(out, x=x, residual=residual, same=True)
    kernels = _kernels("rows", x)
    out = shapes.new_video(x, x.shape) if out is None else out
    kernels.bias_residual(x, bias, residual, residual_bias, out)
    return out


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Single-head attention over the pixels of a frame."""
    _check(q, k, v)
    return _kernels("attention", q).attention(q, k, v)


def interleave_time(x: Tensor, phases: int, *, out: Tensor | None = None) -> Tensor:
    """Spread the temporal phases in the channels over frames: a shuffle with channels last."""
    _check(x)
    refuse_videos(x=x, out=out)
    refuse_sizes(x)
    refuse_overlap(out, x=x)
    kernels = _kernels("layout", x)
    out = shapes.new_video(x, shapes.interleaved(x, phases)) if out is None else out
    kernels.spread(x, (phases, 1, 1), "thwc", out, images=False)
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
    if 1 in grid.shape[3:]:
        raise Refusal("there is nothing to do")
    refuse_sizes(grid)
    kernels = _kernels("layout", grid)
    out = shapes.new_video(grid, shapes.merged(grid)) if out is None else out
    kernels.merge_phases(grid, source, times, bias, out)
    return out


def pixel_shuffle_3d(
    x: Tensor, size: tuple[int, int, int], order: str = "cthw", *, out: Tensor | None = None
) -> Tensor:
    """Turn parts of the channels into frames, rows and columns; `out` may have any strides."""
    _check(x)
    refuse_videos(x=x)
    refuse_sizes(x)
    if out is not None:
        if out.device != x.device:
            raise Refusal("out is on another device")
        if out.dtype not in DTYPES:
            raise Refusal("out is of a dtype without a kernel")
    refuse_overlap(out, x=x)
    kernels = _kernels("layout", x)
    out = shapes.new_video(x, shapes.shuffled(x, size)) if out is None else out
    kernels.spread(x, size, order, out, images=False)
    return out


def average_down(x: Tensor, channels: int, *, times: int, size: int) -> Tensor:
    """Average what falls on one number of a smaller video."""
    _check(x)
    refuse_videos(x=x)
    refuse_sizes(x)
    kernels = _kernels("layout", x)
    out = shapes.new_video(x, shapes.averaged(x, channels, times, size))
    kernels.average_down(x, times, size, out)
    return out


def frames_to_images(
    frames: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    patch: int = 1,
    order: str = "cthw",
    out: Tensor | None = None,
) -> Tensor:
    """Turn decoded frames into images; `out` may have any strides."""
    _check(frames)
    if out is not None:
        dtype = out.dtype
        if out.device != frames.device:
            raise Refusal("out is on another device")
    if dtype not in (*DTYPES, torch.uint8):
        raise Refusal("images are of a dtype without a kernel")
    refuse_videos(frames=frames)
    refuse_sizes(frames)
    refuse_overlap(out, frames=frames)
    kernels = _kernels("layout", frames)
    if out is None:
        out = torch.empty(shapes.images(frames, patch), dtype=dtype, device=frames.device)
    video = out if out.ndim == 5 else out.unflatten(0, (frames.shape[0], frames.shape[2]))
    kernels.spread(frames, (1, patch, patch), order, video.movedim(-1, 1), images=True)
    return out


def _check(x: Tensor, *others: Tensor | None) -> None:
    """Refuse devices, dtypes and gradients that are not ours."""
    refuse_device(x.device, x.dtype)
    refuse_dtype(x)
    refuse_subclass(x)
    refuse_gradients(x, *others)


def _kernels(name: str, x: Tensor) -> ModuleType:
    """A file of kernels, where Triton runs them on the device of `x`."""
    require(x.device)
    return importlib.import_module(f".{name}", __package__)
