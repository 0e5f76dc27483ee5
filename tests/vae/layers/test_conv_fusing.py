"""What a candidate fuses is used: tail, sums, norm; also where memory runs out.

`test_any_way.py` shows that the video is the same whatever is fused.
"""

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.tests.vae.families import STATES, WAN, close, latent_for
from fast_video_vae.tests.vae.layers.candidate import CHOICES, serve
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.layers.oom import Relief
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.models.wan_blocks import ResidualBlock, RMSNorm


@pytest.fixture(scope="module", params=WAN)
def truth(request):
    """A narrow VAE, a latent, and its decode by the library."""
    vae = load_vae(STATES[request.param](), dtype=torch.float32)
    latent = latent_for(vae, 4, 32, 48)
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


def check_runs(cache, between=lambda cache: None):
    """Check that runs of frames give the convolution of the whole video."""
    conv = CausalConv3d(4, 6).requires_grad_(False)
    for parameter in conv.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 9, 5, 7, 4, generator=torch.Generator().manual_seed(1)).movedim(-1, 1)
    results = []
    with torch.no_grad():
        for start, length in ((0, 1), (1, 1), (2, 3), (5, 1), (6, 3)):
            run = x[:, :, start : start + length].contiguous(memory_format=torch.channels_last_3d)
            results.append(conv(run, cache))
            cache.first = False
            between(cache)
    expected = F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0)), conv.weight, conv.bias)
    torch.testing.assert_close(torch.cat(results, dim=2), expected)


def test_a_parked_tail_is_read_and_kept(monkeypatch):
    """A tail that moves to the host between two steps, or in the middle of one, is the same."""
    serve(monkeypatch, "all")
    check_runs(TemporalCache(), TemporalCache.park)


@pytest.mark.parametrize("choice", ["all", "nothing"])
def test_a_frame_without_memory_is_computed_in_bands_of_rows(choice, monkeypatch):
    serve(monkeypatch, choice)
    convolve = CausalConv3d.convolve

    def failing(self, x, kind, *arguments):
        if kind == "volume" and x.shape[3] == 5:
            raise torch.OutOfMemoryError("no memory")
        return convolve(self, x, kind, *arguments)

    monkeypatch.setattr(CausalConv3d, "convolve", failing)
    cache = TemporalCache()
    cache.workspace.relief = Relief(torch.device("cpu"), "a decode")
    check_runs(cache)
    assert cache.workspace.relief.done
