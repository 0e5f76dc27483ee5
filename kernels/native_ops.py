"""The ops in C++ for the CPU; `csrc/cpu` has the kernels and `build.py` builds them.

Each function says in its first lines what it does not take. What it takes is one op of
`torch.ops.fast_video_vae`, which writes into `out`.
"""

from typing import NoReturn

import torch
from torch import Tensor

from .constraints import (
    is_dense,
    new_video,
    refuse_dtype,
    refuse_gradients,
    refuse_overlap,
    refuse_rows,
    refuse_videos,
)
from .dispatch import Refusal
from .libraries import CPU


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
    refuse_videos(x=x, tail=tail, out=out)
    if tail is None:
        refuse_overlap(out, x=x, same=True)
    else:
        refuse_overlap(out, x=x, tail=tail)
        refuse_overlap(tail, x=x)
    CPU.load()
    if out is None:
        batch, channels, frames, height, width = x.shape
        frames += 0 if tail is None else tail.shape[2]
        out = new_video(x, batch, channels, frames, height, width)
    torch.ops.fast_video_vae.rms_norm_silu.default(
        x, _vector(gamma), silu, None if bias is None else _vector(bias), tail, out
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
    front: int = 0,
    replicate: bool = False,
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    statistics: Tensor | None = None,
    tail: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise each frame over its pixels and each group of channels, and apply SiLU."""
    _check(x, weight, bias, statistics)
    refuse_videos(x=x, tail=tail, out=out)
    plain = tail is None and not front and not any(padding)
    refuse_overlap(out, x=x, tail=tail, same=plain)
    refuse_overlap(tail, x=x)
    CPU.load()
    if out is None:
        batch, channels, frames, height, width = x.shape
        left, right, top, bottom = padding
        frames += front if tail is None else tail.shape[2]
        out = new_video(x, batch, channels, frames, height + top + bottom, width + left + right)
    torch.ops.fast_video_vae.group_norm_silu.default(
        x,
        _vector(weight),
        _vector(bias),
        groups,
        eps,
        silu,
        front,
        replicate,
        padding,
        None if statistics is None else statistics.contiguous(),
        tail,
        out,
    )
    return out


def group_norm_statistics(x: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """Measure each frame over its pixels and each group of channels."""
    _check(x)
    refuse_videos(x=x)
    CPU.load()
    shape = x.shape[0], x.shape[2], 2, groups
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    torch.ops.fast_video_vae.group_norm_statistics.default(x, groups, eps, out)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """Normalise the last dimension by its root mean square, and scale."""
    _check(x, weight)
    refuse_rows(x=x, out=out)
    refuse_overlap(out, x=x, same=True)
    CPU.load()
    if out is None:
        out = x.new_empty(x.shape)
    torch.ops.fast_video_vae.rms_norm.default(x, _vector(weight), eps, out)
    return out


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """SiLU of one tensor times another: `x * sigmoid(x) * gate`."""
    _check(x, gate)
    refuse_rows(x=x, gate=gate, out=out)
    refuse_overlap(out, x=x, gate=gate, same=True)
    CPU.load()
    if out is None:
        out = x.new_empty(x.shape)
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
    if out is None:
        out = new_video(x, *x.shape)
    torch.ops.fast_video_vae.bias_residual.default(
        x,
        None if bias is None else _vector(bias),
        residual,
        None if residual_bias is None else _vector(residual_bias),
        out,
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
    if out is None:
        batch, channels, frames, height, width = x.shape
        out = new_video(x, batch, channels // phases, phases * frames, height, width)
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
    if out is None:
        batch, channels, frames, height, width = grid.shape
        out = new_video(grid, batch, channels // 4, frames, 2 * height - 2, 2 * width - 2)
    offset = None if bias is None else _vector(bias)
    torch.ops.fast_video_vae.merge_phases.default(grid, source, times, offset, out)
    return out


def pixel_shuffle_3d(
    x: Tensor,
    size: tuple[int, int, int],
    order: str = "cthw",
    *,
    skip: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Turn parts of the channels into frames, rows and columns."""
    _check(x)
    if out is not None and (out.dtype != x.dtype or out.device != x.device):
        raise Refusal("out is of another dtype or device")
    refuse_videos(x=x, out=out)
    refuse_overlap(out, x=x)
    CPU.load()
    if out is None:
        batch, channels, frames, height, width = x.shape
        times, high, wide = size
        channels //= times * high * wide
        out = new_video(x, batch, channels, times * frames - skip, high * height, wide * width)
    torch.ops.fast_video_vae.pixel_shuffle_3d.default(x, size, order, skip, out)
    return out


def average_down(x: Tensor, channels: int, *, times: int, size: int) -> Tensor:
    """Average what falls on one number of a smaller video."""
    _check(x)
    refuse_videos(x=x)
    CPU.load()
    batch, _, frames, height, width = x.shape
    out = new_video(x, batch, channels, -(-frames // times), height // size, width // size)
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
        batch, channels, length, height, width = frames.shape
        shape = (batch * length, patch * height, patch * width, channels // (patch * patch))
        out = torch.empty(shape, dtype=dtype, device=frames.device)
    torch.ops.fast_video_vae.frames_to_images.default(frames, patch, order, out)
    return out


def _check(x: Tensor, *others: Tensor | None) -> None:
    """Refuse devices, dtypes and gradients that are not ours; `others` share the device."""
    if x.device.type not in ("cpu", "meta"):
        raise Refusal(f"the tensors are on {x.device.type}; native is for the CPU")
    refuse_dtype(x)
    refuse_gradients(x, *others)


def _vector(values: Tensor) -> Tensor:
    """Parameters as the kernels read them: dense float32."""
    if values.dtype is torch.float32 and values.is_contiguous():
        return values
    return values.float().contiguous()
