"""Norms, gates and sums: every pixel, or every frame, by itself."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .memory import copies, delivered, map_blocks, new_video, records, widened

# `torch.nn.functional.normalize` divides by max(norm, eps) with this eps; Wan's RMS_norm is built
# on it.
_NORM_EPS = 1e-12


def rms_norm_silu(
    x: Tensor,
    gamma: Tensor,
    *,
    silu: bool = True,
    bias: Tensor | None = None,
    tail: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply by the inverse norm of each pixel and by `sqrt(C) * gamma`.

    Where autograd records, `tail` is read alone: the caller keeps the last frames of the result.
    """
    wide = widened(x)
    scale = gamma.flatten().to(wide) * math.sqrt(x.shape[1])
    bias = None if bias is None else bias.flatten().to(wide)
    if records(x, gamma, bias, tail, out):
        y = _read(x, wide, out)
        y = y if bias is None else y + bias.view(-1, 1, 1, 1)
        y = F.normalize(y, dim=1, eps=_NORM_EPS) * scale.view(-1, 1, 1, 1)
        y = _channels_last((F.silu(y) if silu else y).to(x.dtype))
        y = y if tail is None else _channels_last(torch.cat([tail, y], dim=2))
        return delivered(y, x, out)

    def norm(rows: Tensor) -> None:
        if bias is not None:
            rows.add_(bias)
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        rows.mul_(norms.clamp_min_(_NORM_EPS).reciprocal_()).mul_(scale)
        if silu:
            F.silu(rows, inplace=True)

    batch, channels, frames, height, width = x.shape
    known = 0 if tail is None else tail.shape[2]
    if out is None:
        out = new_video(x, batch, channels, known + frames, height, width)
    map_blocks(norm, x.movedim(1, -1), out[:, :, known:].movedim(1, -1))
    if tail is not None:
        out[:, :, :known].copy_(tail)
        tail.copy_(out[:, :, frames:])
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
    tail: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Three passes over each frame: its means, its centred squares, the result.

    Where autograd records, `tail` is read alone: the caller keeps the last frames of the result.
    """
    wide = widened(x)
    weight, bias = weight.flatten().to(wide), bias.flatten().to(wide)
    batch, channels, frames, height, width = x.shape
    if records(x, weight, bias, tail, out):
        y = _grouped(_read(x, wide, out), weight, bias, groups, eps)
        y = (F.silu(y) if silu else y).to(x.dtype)
        before = y.new_zeros(batch, channels, front, height, width) if tail is None else tail
        if tail is None and replicate and frames:
            before = y[:, :, :1].expand_as(before)
        y = F.pad(torch.cat([before, y], dim=2), padding)
        return delivered(_channels_last(y), x, out)

    left, right, top, bottom = padding
    known = front if tail is None else tail.shape[2]
    if out is None:
        shape = known + frames, height + top + bottom, width + left + right
        out = new_video(x, batch, channels, *shape)
    for border in (
        out[:, :, :, :top],
        out[:, :, :, top + height :],
        out[..., :left],
        out[..., left + width :],
    ):
        border.zero_()
    inner = out[:, :, :, top : top + height, left : left + width]
    videos = zip(x, inner[:, :, known:], strict=True) if x.numel() else ()
    for one, into in videos:
        for frame, target in zip(one.movedim(0, -1), into.movedim(0, -1), strict=True):
            _normalize(frame, target, weight, bias, groups, eps, silu)
    if tail is not None:
        inner[:, :, :known].copy_(tail)
        tail.copy_(inner[:, :, frames:])
    elif replicate and frames:
        inner[:, :, :front].copy_(inner[:, :, front : front + 1])
    else:
        inner[:, :, :front].zero_()
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """Multiply by the inverse root mean square of each row and by `weight`."""
    wide = widened(x)
    weight = weight.flatten().to(wide)
    if records(x, weight, out):
        rows = _read(x, wide, out)
        y = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        return delivered(y, x, out)

    def norm(rows: Tensor) -> None:
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        means = norms.square_().div_(rows.shape[-1])
        rows.mul_(means.add_(eps).rsqrt_()).mul_(weight)

    out = x.new_empty(x.shape) if out is None else out
    map_blocks(norm, x, out)
    return out


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """SiLU, then the product."""
    if records(x, gate, out):
        wide = widened(x)
        return delivered(F.silu(_read(x, wide, out)) * _read(gate, wide, out), x, out)
    out = x.new_empty(x.shape) if out is None else out
    map_blocks(lambda rows, gates: F.silu(rows, inplace=True).mul_(gates), x, out, gate)
    return out


def bias_residual(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add one after the other."""
    wide = widened(x)
    bias, residual_bias = (
        None if numbers is None else numbers.flatten().to(wide) for numbers in (bias, residual_bias)
    )

    def sums(rows: Tensor, *residuals: Tensor) -> None:
        for added in (bias, *residuals, residual_bias):
            if added is not None:
                rows.add_(added)

    added = () if residual is None else (residual.movedim(1, -1),)
    if records(x, bias, residual, residual_bias, out):
        rows = x.movedim(1, -1).to(wide, copy=True)
        sums(rows, *added)
        return delivered(_channels_last(rows.movedim(-1, 1)), x, out)
    out = new_video(x, *x.shape) if out is None else out
    map_blocks(sums, x.movedim(1, -1), out.movedim(1, -1), *added)
    return out


def _read(x: Tensor, wide: torch.dtype, out: Tensor | None) -> Tensor:
    """`x` to record a function of; in memory of its own where `out` may be `x`."""
    return x.to(wide, copy=out is not None)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


def _grouped(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """The group norm of every frame in differentiable steps, `[B, C, T, H, W]`."""
    parts = x.unflatten(1, (groups, x.shape[1] // groups))
    centred = parts - parts.mean(dim=(2, 4, 5), keepdim=True)
    variance = centred.square().mean(dim=(2, 4, 5), keepdim=True)
    y = (centred * (variance + eps).rsqrt()).flatten(1, 2)
    return y * weight.view(-1, 1, 1, 1) + bias.view(-1, 1, 1, 1)


def _normalize(
    frame: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    silu: bool,
) -> None:
    """The group norm of one frame, `[H, W, C]`.

    The mean is rounded before it is subtracted. Where it is much larger than the deviations, that
    is more than their own rounding; so what it lacks is measured in the second pass, and
    subtracted with the bias.
    """
    wide, channels = weight.dtype, weight.numel()
    count, size = frame.numel() // groups, channels // groups

    def means(sums: list[Tensor]) -> Tensor:  # of blocks and channels, to [groups]
        return torch.stack(sums).sum(dim=0).view(groups, size).sum(dim=1) / count

    def spread(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(size)

    mean = spread(means([rows.sum(dim=(0, 1)) for rows in copies(frame, wide)]))
    sums, squares = [], []
    for rows in copies(frame, wide):
        sums.append(rows.sub_(mean).sum(dim=(0, 1)))
        squares.append(rows.square_().sum(dim=(0, 1)))
    lack = means(sums)
    variance = (means(squares) - lack.square()).clamp_min(0)
    scale = spread((variance + eps).rsqrt()) * weight
    offset = bias - spread(lack) * scale

    def norm(rows: Tensor) -> None:
        rows.sub_(mean).mul_(scale).add_(offset)
        if silu:
            F.silu(rows, inplace=True)

    map_blocks(norm, frame, target)
