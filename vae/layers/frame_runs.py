"""Runs of frames: cut or filled up to a length, and in parts."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels import new_video
from .temporal_cache import canonical


def fitted(x: Tensor, frames: int) -> Tensor:
    """Return the first `frames` frames of `x`, with its last frame repeated if it has fewer."""
    known = x.shape[2]
    if frames == known:
        return x
    if frames < known:
        return canonical(x[:, :, :frames].contiguous(memory_format=torch.channels_last_3d))
    batch, channels, _, height, width = x.shape
    y = new_video(x, (batch, channels, frames, height, width))
    y[:, :, :known] = x
    y[:, :, known:] = x[:, :, -1:]
    return y


def parts(x: Tensor, frames: int, size: int) -> Iterator[Tensor]:
    """Yield `fitted(x, frames)` in parts, which the caller may overwrite; it is never whole."""
    known = x.shape[2]
    last = x[:, :, -1:].clone() if frames > known else x
    for start in range(0, frames, size):
        count = min(size, frames - start)
        if start < known:
            run = fitted(x[:, :, start : start + count], count)
            yield run.contiguous(memory_format=torch.channels_last_3d)
        else:
            run = last.expand(-1, -1, count, -1, -1)
            yield run.clone(memory_format=torch.channels_last_3d)


def largest_part(frames: int, nbytes: int, part_bytes: int, *, even: bool = True) -> int:
    """Return the most frames of an activation that fit into a part; equal parts if `even`."""
    if nbytes <= part_bytes:
        return frames
    most = max(1, part_bytes * frames // nbytes)
    if not even:
        return -(-frames // -(-frames // most))
    return max(part for part in range(1, most + 1) if frames % part == 0)
