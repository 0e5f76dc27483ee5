"""Pixels in channels: the patches of Wan 2.2, and the phases of the 2x decoders.

`pixel_shuffle_3d` and `frames_to_images` convert back and take the same orders.
"""

from einops import rearrange
from torch import Tensor

# Index of a patch's pixel within the channels, from the slowest to the fastest: channel (c * size +
# x) * size + y, or (c * size + y) * size + x.
COLUMN_FIRST = "ctwh"
ROW_FIRST = "cthw"


def fold_pixels(frames: Tensor, size: int) -> Tensor:
    """Move blocks of `size x size` pixels to channels, as `patchify` of wan/modules/vae2_2.py."""
    if size == 1:
        return frames
    pattern = "b c t (h y) (w x) -> b t h w (c x y)"
    return rearrange(frames, pattern, y=size, x=size).movedim(-1, 1)
