"""The temporal cache: tails of a video, and buffers without other users."""

import math
import weakref

import pytest
import torch

from fast_video_vae.tests.vae.families import STATES
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.layers import temporal_cache as workspace
from fast_video_vae.vae.layers.causal_conv import CausalConv3d, copied
from fast_video_vae.vae.layers.temporal_cache import TemporalCache

SHAPE = (1, 4, 2, 3, 5)


def test_blocks_of_another_size_are_released_and_uncounted_ones_not_reused(monkeypatch):
    monkeypatch.setattr(workspace, "KEPT_BYTES", 0)
    cache, like = TemporalCache(), torch.empty(1)
    cache.reused(SHAPE, like)
    large = cache.reused((1, 4, 20, 3, 5), like)
    assert [block.numel() for block in cache.workspace._blocks] == [large.nbytes]
    monkeypatch.setattr(workspace, "_count_alone", lambda: None)  # an unknown PyTorch
    assert cache.reused(SHAPE, like) is None


@pytest.mark.parametrize("family", ["wan2.1", "wan2.2"])
def test_old_values_in_reused_memory_have_no_effect(family, monkeypatch):
    vae = load_vae(STATES[family](), dtype=torch.float32)
    video = torch.rand(1, 3, 9, 32, 32) * 2 - 1
    monkeypatch.setattr(workspace, "KEPT_BYTES", 1 << 40)
    latent = vae.encode(video)
    frames = vae.decode(latent)
    lent = []

    def poisoned(self, shape, like):
        memory = reused(self, shape, like)
        lent.append(memory.fill_(math.nan).data_ptr())
        return memory

    reused = workspace.Workspace.reused
    monkeypatch.setattr(workspace, "KEPT_BYTES", 0)
    monkeypatch.setattr(workspace.Workspace, "reused", poisoned)
    assert torch.equal(vae.encode(video), latent)
    assert torch.equal(vae.decode(latent), frames)
    assert len(set(lent)) < len(lent), "no memory was reused"


@torch.no_grad()
def test_the_input_is_freed_before_the_products(monkeypatch):
    """So the result of the first convolution of a block and of the second are never both there."""
    alive, given, convolve = [], [], CausalConv3d.convolve

    def looked(self, *arguments):
        alive.append(given[-1]() is not None)
        return convolve(self, *arguments)

    monkeypatch.setattr(CausalConv3d, "convolve", looked)
    cache, conv = TemporalCache(), CausalConv3d(4, 6)
    for _ in range(3):
        handed = [torch.zeros(SHAPE)[:, :, :1].clone()]
        given.append(weakref.ref(handed[0]))
        conv(handed, cache, copied)
        cache.first = False
    assert alive == [False] * 3
