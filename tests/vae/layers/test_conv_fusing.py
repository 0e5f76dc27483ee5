"""What a candidate fuses is used: tail, sums, norm.

`test_any_way.py` shows that the video is the same whatever is fused.
"""

import pytest
import torch

from fast_video_vae.tests.vae.families import STATES, close, latent_for
from fast_video_vae.tests.vae.layers.candidate import CHOICES, serve
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.models.wan_blocks import ResidualBlock, RMSNorm


@pytest.fixture(scope="module")
def truth():
    """A narrow VAE, a latent, and its decode by the library."""
    vae = load_vae(STATES["wan2.1"](), dtype=torch.float32)
    latent = latent_for(vae, 3, 32, 48)
    return vae, latent, vae.decode(latent)


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_fused_is_used(truth, monkeypatch, choice):
    """With all of it a block runs one pass for its first norm, and none for its second."""
    vae, latent, decoded = truth
    calls, silu = [], RMSNorm.silu
    candidate = serve(monkeypatch, choice)
    monkeypatch.setattr(RMSNorm, "silu", lambda *a, **k: calls.append(a[0]) or silu(*a, **k))
    close(vae.decode(latent), decoded)
    assert bool(candidate.tails) == candidate.fused.tail
    assert bool(candidate.norms) == candidate.fused.norm
    blocks = [each for each in vae.decoder.modules() if isinstance(each, ResidualBlock)]
    assert {block.residual["0"] for block in blocks} <= set(calls)
    if choice == "all":
        assert not {block.residual["3"] for block in blocks} & set(calls)
