"""Norms, gates and sums, independent for each pixel or frame."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..codes import zero_of
from .memory import copies, map_blocks, widened

# `torch.nn.functional.normalize`, which Wan's RMS_norm uses, divides by max(norm, eps) with this
# eps.
_NORM_EPS = 1e-12


def rms_norm_silu(x: Tensor, gamma: Tensor, bias: Tensor | None, *window: Any) -> Tensor:  # noqa: ANN401
    """Multiply by the inverse norm of each pixel and by `sqrt(C) * gamma`."""
    tail, out, codes, saturated, silu, border = window
    wide = widened(x)
    scale = gamma.flatten().to(wide) * math.sqrt(x.shape[1])
    bias = None if bias is None else bias.flatten().to(wide)

    def norm(rows: Tensor) -> None:
        if bias is not None:
            rows.add_(bias)
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        rows.mul_(norms.clamp_min_(_NORM_EPS).reciprocal_()).mul_(scale)
        if silu:
            F.silu(rows, inplace=True)
        encode(rows)

    inner, encode = _bordered(out, border), _encoder(out, codes, saturated)
    map_blocks(norm, x.movedim(1, -1), _behind(tail, inner).movedim(1, -1))
    _roll(tail, inner)
    return out


def group_norm_silu(
    x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor | None, *ends: Any,  # noqa: ANN401
) -> Tensor:  # fmt: skip
    """Normalise each frame in three passes over cached blocks: means, squares, result."""
    tail, out, codes, saturated, groups, eps, silu, border = ends
    wide = widened(x)
    weight, bias = weight.flatten().to(wide), bias.flatten().to(wide)
    inner, encode = _bordered(out, border), _encoder(out, codes, saturated)
    new = _behind(tail, inner)
    for b, t in product(range(x.shape[0]), range(x.shape[2])) if x.numel() else ():
        frame = x[b, :, t].movedim(0, -1)
        measured = _measure(frame, wide, groups, eps) if statistics is None else statistics[b, t]
        mean, inverse = measured.repeat_interleave(x.shape[1] // groups, dim=-1)

        def norm(rows: Tensor, mean: Tensor = mean, scale: Tensor = inverse * weight) -> None:
            rows.sub_(mean).mul_(scale).add_(bias)
            if silu:
                F.silu(rows, inplace=True)
            encode(rows)

        map_blocks(norm, frame, new[b, :, t].movedim(0, -1))
    _roll(tail, inner)
    return out


def group_norm_statistics(x: Tensor, out: Tensor, groups: int, eps: float) -> Tensor:
    """Measure each frame in two passes."""
    out.fill_(math.nan)
    for b, t in product(range(x.shape[0]), range(x.shape[2])) if x.numel() else ():
        out[b, t] = _measure(x[b, :, t].movedim(0, -1), widened(x), groups, eps)
    return out


def silu_mul(x: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """Gate in blocks of rows."""
    map_blocks(lambda rows, gates: F.silu(rows, inplace=True).mul_(gates), x, out, gate)
    return out


def bias_residual(x: Tensor, *terms: Any) -> Tensor:  # noqa: ANN401
    """Add the terms in blocks of rows."""
    bias, residual, residual_bias, out = terms
    wide = widened(x)
    bias, residual_bias = (
        None if y is None else y.flatten().to(wide) for y in (bias, residual_bias)
    )

    def sums(rows: Tensor, *residuals: Tensor) -> None:
        for added in (bias, *residuals, residual_bias):
            if added is not None:
                rows.add_(added)

    added = () if residual is None else (residual.movedim(1, -1),)
    map_blocks(sums, x.movedim(1, -1), out.movedim(1, -1), *added)
    return out


def _encoder(
    out: Tensor, codes: Tensor | None, saturated: Tensor | None
) -> Callable[[Tensor], object]:
    """Return a function that replaces rows `[..., C]` by their codes in `out` `[...]`."""
    if codes is None or saturated is None:
        return lambda rows: rows
    zero, highest = zero_of(out.dtype), torch.iinfo(out.dtype).max

    def encode(rows: Tensor) -> None:
        rows.mul_(codes).round_().add_(zero)
        missing = rows.isnan()
        outside = ((rows < highest - 255) | (rows > highest)).sum()
        saturated.add_(torch.stack([outside, missing.sum()]))
        rows.masked_fill_(missing, zero).clamp_(highest - 255, highest)

    return encode


def _bordered(out: Tensor, border: int) -> Tensor:
    """Write zeros to the border of each frame of `out` `[B, C, T, H, W]`; return the rest."""
    if not border:
        return out
    zero = zero_of(out.dtype)
    for dim in (3, 4):
        out.narrow(dim, 0, border).fill_(zero)
        out.narrow(dim, out.shape[dim] - border, border).fill_(zero)
    return out[..., border:-border, border:-border]


def _behind(tail: Tensor | None, out: Tensor) -> Tensor:
    """Return the frames of `out` after those of `tail`."""
    return out if tail is None else out[:, :, tail.shape[2] :]


def _roll(tail: Tensor | None, out: Tensor) -> None:
    """Copy `tail` to the front of `out`, and the last frames of `out` to `tail`."""
    if tail is not None:
        known, frames = tail.shape[2], out.shape[2]
        out[:, :, :known].copy_(tail)
        tail.copy_(out[:, :, frames - known :])


def _measure(frame: Tensor, wide: torch.dtype, groups: int, eps: float) -> Tensor:
    """Return mean and `1 / sqrt(var + eps)` of each group of a frame `[H, W, C]`: `[2, groups]`."""
    # A sum of many values has more rounding errors than its quotient, which would show in the
    # deviations where the mean is large. So the second pass measures the error of the mean and
    # corrects mean and variance with it.
    count, size = frame.numel() // groups, frame.shape[-1] // groups

    def means(sums: list[Tensor]) -> Tensor:  # of blocks and channels, to [groups]
        return torch.stack(sums).sum(dim=0).view(groups, size).sum(dim=1) / count

    mean = means([rows.sum(dim=(0, 1)) for rows in copies(frame, wide)])
    center = mean.repeat_interleave(size)
    sums, squares = [], []
    for rows in copies(frame, wide):
        sums.append(rows.sub_(center).sum(dim=(0, 1)))
        squares.append(rows.square_().sum(dim=(0, 1)))
    lack = means(sums)
    variance = (means(squares) - lack.square()).clamp_min(0)
    return torch.stack([mean + lack, (variance + eps).rsqrt()])
