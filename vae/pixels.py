"""Pixels in channels and back: the patches of Wan 2.2, and the phases of the 2x decoders."""

import torch
from torch import Tensor

# Which of a patch's pixels a channel holds: channel (c * size + x) * size + y, or
# (c * size + y) * size + x.
COLUMN_FIRST = "column first"
ROW_FIRST = "row first"


def fold_pixels(frames: Tensor, size: int, order: str) -> Tensor:
    """Lay `size x size` pixels side by side in channels.

    Args:
        frames: `[B, C, T, H, W]`; `H` and `W` are multiples of `size`.
        size: Side of a patch.
        order: `COLUMN_FIRST` as Wan 2.2, whose `patchify` is "b c f (h q) (w r) -> b (c r q) f h w"
            (wan/modules/vae2_2.py), or `ROW_FIRST`.

    Returns:
        `[B, C * size^2, T, H / size, W / size]`, channels-last.
    """
    if size == 1:
        return frames
    batch, channels, length, height, width = frames.shape
    shape = (batch, length, height // size, width // size, channels * size * size)
    folded = torch.empty(shape, dtype=frames.dtype, device=frames.device)
    blocks = frames.unflatten(4, (-1, size)).unflatten(3, (-1, size))  # [B, C, T, h, y, w, x]
    axes = (0, 2, 3, 5, 1, 6, 4) if order == COLUMN_FIRST else (0, 2, 3, 5, 1, 4, 6)
    source = blocks.permute(axes)
    folded.view(source.shape).copy_(source)
    return folded.movedim(-1, 1)


def unfold_pixels(x: Tensor, size: int, order: str, out: Tensor | None = None) -> Tensor:
    """Undo `fold_pixels`, in one write.

    Args:
        x: `[B, C * size^2, T, H, W]`.
        size: Side of a patch.
        order: As for `fold_pixels`. The 2x decoders have `ROW_FIRST`, as `torch.nn.PixelShuffle`.
        out: `[B, C, T, size * H, size * W]`, of any dtype, strides and device; None: a new
            channels-last tensor, or `x` itself where nothing is folded.

    Returns:
        `out`.
    """
    if size == 1:
        return x if out is None else out.copy_(x)
    batch, channels, length, height, width = x.shape
    channels //= size * size
    if out is None:
        shape = (batch, length, height * size, width * size, channels)
        out = torch.empty(shape, dtype=x.dtype, device=x.device).movedim(-1, 1)
    patches = x.unflatten(1, (channels, size, size))  # [B, C, x, y, T, H, W] or [B, C, y, x, ...]
    axes = (0, 1, 4, 5, 3, 6, 2) if order == COLUMN_FIRST else (0, 1, 4, 5, 2, 6, 3)
    target = out.unflatten(4, (width, size)).unflatten(3, (height, size))  # [B, C, T, H, y, W, x]
    target.copy_(patches.permute(axes))
    return out
