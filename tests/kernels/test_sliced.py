"""The convolution in slices equals PyTorch's own `conv3d` in float64, in groups of any size."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae import kernels
from fast_video_vae.kernels import use_backend
from fast_video_vae.kernels.convolution import sliced
from fast_video_vae.tests.kernels.cases import random, video

TAPS = [(3, 3, 3), (2, 3, 3), (3, 1, 1), (2, 2, 2), (1, 3, 3)]
STRIDES = [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2)]
BORDERS = [(0, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize("joined_bytes", [1, 20_000, 1 << 26])
@pytest.mark.parametrize(("taps", "stride", "padding"), [*product(TAPS, STRIDES, BORDERS)])
def test_slices_are_the_convolution(taps, stride, padding, joined_bytes, monkeypatch):
    monkeypatch.setattr(sliced, "_JOINED_BYTES", joined_bytes)
    weight = random(6, 4, *taps, dtype=torch.float64)
    for tail_frames, frames in ((0, 5), (1, 4), (2, 1), (2, 6)):
        if tail_frames + frames < taps[0]:
            continue
        x = video(2, 4, frames, 7, 6, dtype=torch.float64)
        tail = video(2, 4, tail_frames, 7, 6, dtype=torch.float64, seed=1) if tail_frames else None
        window = x if tail is None else torch.cat([tail, x], dim=2)
        expected = F.conv3d(window, weight, None, stride, (0, *padding))
        with use_backend("sliced"):
            y = kernels.conv3d(x, weight, stride=stride, padding=padding, tail=tail)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        assert y.is_contiguous(memory_format=torch.channels_last_3d)
