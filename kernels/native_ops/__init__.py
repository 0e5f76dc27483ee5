"""The ops in C++ for the CPU; `csrc/cpu` has the kernels, and `build.py` builds them.

Each function refuses what it does not support, and runs an op of `torch.ops.fast_video_vae`.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import shapes
from ..constraints import (
    is_dense,
    refuse_dtype,
    refuse_overlap,
    refuse_rows,
    refuse_videos,
    video_target,
    window_of,
)
from ..errors import Refusal
from .build import CPU


def rms_norm_silu(
    x: Tensor,
    gamma: Tensor,
    *,
    silu: bool = True,
    bias: Tensor | None = None,
    **written: Any,  # noqa: ANN401, those of `window_of`
) -> Tensor:
    """Normalise rows of pixels."""
    _check(x)
    tail, out, border, codes, saturated = window_of(x, **written)
    ends = tail, border, _vector(codes), saturated, out
    return _run("rms_norm_silu", x, _vector(gamma), silu, _vector(bias), *ends)


def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    *,
    eps: float = 1e-6,
    silu: bool = True,
    statistics: Tensor | None = None,
    **written: Any,  # noqa: ANN401, those of `window_of`
) -> Tensor:
    """Normalise each frame, measured first without `statistics`, row by row."""
    _check(x)
    tail, out, border, codes, saturated = window_of(x, **written)
    given = None if statistics is None else statistics.contiguous()
    vectors, ends = (_vector(weight), _vector(bias)), (tail, border, _vector(codes), saturated)
    return _run("group_norm_silu", x, *vectors, groups, eps, silu, given, *ends, out)


def group_norm_statistics(x: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """Measure each frame."""
    _check(x)
    refuse_videos(x=x)
    out = torch.empty(shapes.statistics(x, groups), dtype=torch.float32, device=x.device)
    return _run("group_norm_statistics", x, groups, eps, out)


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gate rows."""
    _check(x)
    refuse_rows(x=x, gate=gate, out=out)
    refuse_overlap(out, x=x, gate=gate, same=True)
    out = x.new_empty(x.shape) if out is None else out
    return _run("silu_mul", x, gate, out)


def bias_residual(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add the terms to rows."""
    _check(x)
    out = video_target(x.shape, out, x=x, residual=residual, same=True)
    return _run("bias_residual", x, _vector(bias), residual, _vector(residual_bias), out)


def attention(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    """Refuse: the CPU uses PyTorch's fused kernel."""
    raise Refusal("PyTorch's fused kernel runs on the CPU")


def interleave_time(x: Tensor, phases: int, *, out: Tensor | None = None) -> Tensor:
    """Copy the phases of each frame."""
    _check(x)
    out = video_target(shapes.interleaved(x, phases), out, x=x)
    return _run("interleave_time", x, phases, out)


def merge_phases(
    grid: Tensor,
    source: Tensor | None = None,
    times: int = 1,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Write rows of the picture from rows of windows."""
    _check(grid)
    out = video_target(shapes.merged(grid), out, grid=grid, source=source)
    return _run("merge_phases", grid, source, times, _vector(bias), out)


def pixel_shuffle_3d(
    x: Tensor, size: tuple[int, int, int], order: str = "cthw", *, out: Tensor | None = None
) -> Tensor:
    """Move parts of the channels."""
    _check(x)
    if out is not None and (out.dtype != x.dtype or out.device != x.device):
        raise Refusal("out has another dtype or device")
    out = video_target(shapes.shuffled(x, size), out, x=x)
    return _run("pixel_shuffle_3d", x, size, order, out)


def average_down(x: Tensor, channels: int, *, times: int, size: int) -> Tensor:
    """Average block by block."""
    _check(x)
    refuse_videos(x=x)
    out = shapes.new_video(x, shapes.averaged(x, channels, times, size))
    return _run("average_down", x, times, size, out)


def frames_to_images(
    frames: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    patch: int = 1,
    order: str = "cthw",
    out: Tensor | None = None,
) -> Tensor:
    """Convert and clamp rows of pixels."""
    _check(frames)
    if out is not None:
        dtype = out.dtype
        if out.device != frames.device:
            raise Refusal("out is on another device")
        if not is_dense(out, -3, -2, -1):
            raise Refusal("the pixels of out are not dense")
    if dtype not in (torch.float32, torch.uint8, torch.uint16):
        name = str(dtype).removeprefix("torch.")
        raise Refusal(f"images are {name}; native writes float32, uint8 and uint16")
    refuse_videos(frames=frames)
    refuse_overlap(out, frames=frames)
    if out is None:
        out = torch.empty(shapes.images(frames, patch), dtype=dtype, device=frames.device)
    return _run("frames_to_images", frames, patch, order, shapes.white(dtype), out)


def _run(op: str, *args: Any) -> Tensor:  # noqa: ANN401, those of the op
    """Run an op of the library, which writes into its last argument."""
    CPU.require()
    getattr(torch.ops.fast_video_vae, op).default(*args)
    return args[-1]


def _check(x: Tensor) -> None:
    """Refuse devices and dtypes that the kernels do not support."""
    if x.device.type not in ("cpu", "meta"):
        raise Refusal(f"the tensors are on {x.device.type}; native needs the CPU")
    refuse_dtype(x)


def _vector(values: Tensor | None) -> Tensor | None:
    """Return parameters dense and in float32, for the kernels."""
    return None if values is None else values.float().contiguous()
