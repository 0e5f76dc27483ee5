"""Pixels in channels: the patches of Wan 2.2, and the phases of the 2x decoders.

Back to pixels they come with `pixel_shuffle_3d` and `frames_to_images`, which take the same orders.
"""

import torch
from torch import Tensor

# Which of a patch's pixels a channel holds, from the slowest index to the fastest: channel
# (c * size + x) * size + y, or (c * size + y) * size + x.
COLUMN_FIRST = "ctwh"
ROW_FIRST = "cthw"


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
