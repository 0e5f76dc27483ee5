"""Pixels to channels and back, compared with the notation of their sources."""

import pytest
import torch
from einops import rearrange

from fast_video_vae.kernels import pixel_shuffle_3d
from fast_video_vae.vae.models.patchify import COLUMN_FIRST, ROW_FIRST, fold_pixels

# wan/modules/vae2_2.py, `patchify` and `unpatchify`; torch.nn.PixelShuffle.
NOTATION = {
    COLUMN_FIRST: "b c f (h q) (w r) -> b (c r q) f h w",
    ROW_FIRST: "b c f (h q) (w r) -> b (c q r) f h w",
}


@pytest.mark.parametrize("order", [COLUMN_FIRST, ROW_FIRST])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_folding_pixels_and_pixel_shuffle_match_the_notation(order, size):
    frames = torch.randn(2, 3, 4, 2 * size, 5 * size)
    folded = rearrange(frames, NOTATION[order], q=size, r=size)
    if order == COLUMN_FIRST:
        ours = fold_pixels(frames, size)
        assert torch.equal(ours, folded)
        assert size == 1 or ours.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(pixel_shuffle_3d(folded, (1, size, size), order), frames)
