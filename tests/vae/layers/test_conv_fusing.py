"""A VAE gives the same video whatever its convolutions fuse: tail, sums, norm."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fast_video_vae.kernels import Fused, backends, modules
from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.vae.families import (
    STATES,
    VIDEO,
    close,
    joined,
    latent_for,
    random_frames,
)
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers import conv
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.layers.conv import BIAS
from fast_video_vae.vae.layers.oom import Relief
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.models.wan_blocks import ResidualBlock, RMSNorm

CPU = torch.device("cpu")

ALL = Fused(tail=True, sums=True, norm=True, bias=True)
CHOICES = {
    "all": ALL,
    "tail": Fused(tail=True),
    "tail and sums": Fused(tail=True, sums=True, bias=True),
    "norm without tail": Fused(sums=True, norm=True, bias=True),
    "nothing": Fused(),
}


class Candidate:
    """A candidate that fuses what it is given, and counts how it is called."""

    def __init__(self, fused: Fused) -> None:
        self.fused = fused
        self.tails = self.norms = 0

    def fuses(self, x, weight, stride, padding, *, norm):
        return self.fused

    def conv3d(self, x, weight, bias=None, *, stride, padding, tail=None, **terms):
        assert tail is None or self.fused.tail
        self.tails += tail is not None
        window = x if tail is None else torch.cat([tail, x], dim=2)
        y = F.conv3d(window, weight.plain(), None, stride, (0, *padding))
        return self._finished(y, bias, **terms)

    def conv2d(self, x, weight, bias=None, *, stride, padding, **terms):
        y = F.conv2d(x, weight.plain(), None, stride, padding)
        return self._finished(y, bias, **terms)

    def _finished(self, y, bias, residual=None, residual_bias=None, gamma=None, out=None) -> Tensor:
        assert self.fused.sums or (residual, residual_bias, gamma, out) == (None,) * 4
        ones = [1] * (y.ndim - 2)
        for each in (bias, residual_bias):
            y = y if each is None else y + each.view(1, -1, *ones)
        y = y if residual is None else y + residual
        if gamma is not None:
            self.norms += 1
            y = F.normalize(y, dim=1, eps=1e-12) * y.shape[1] ** 0.5 * gamma.view(1, -1, *ones)
            y = F.silu(y)
        order = torch.channels_last if y.ndim == 4 else torch.channels_last_3d
        return y.contiguous(memory_format=order) if out is None else out.copy_(y)


@pytest.fixture
def serving(monkeypatch):
    """Return a function that lets a candidate serve all convolutions that it does not refuse."""

    def serve(fused: Fused) -> Candidate:
        candidate = Candidate(fused)
        names = SimpleNamespace(**{k: getattr(candidate, k) for k in ("fuses", "conv2d", "conv3d")})
        monkeypatch.setitem(modules._loaded, "sliced", names)
        monkeypatch.setattr(conv, "route_token", lambda: candidate)  # kept routes are of others
        monkeypatch.setattr(backends, "CONVOLUTION_ORDER", ("sliced", "reference"))
        return candidate

    return serve


@pytest.fixture(scope="module", params=VIDEO)
def truth(request):
    """A narrow VAE, a latent and frames, with their decode and encode by the library."""
    vae = load_vae(STATES[request.param](), dtype=torch.float32)
    latent, frames = latent_for(vae, 4, 32, 48), random_frames(1, 3, 13, 32, 48)
    return vae, latent, frames, vae.decode(latent), vae.encode(frames)


@each_value_once(choice=CHOICES, chunk=[1, 2, -1])
def test_a_video_is_the_same_whatever_is_fused(truth, serving, choice, chunk):
    vae, latent, frames, decoded, encoded = truth
    candidate = serving(CHOICES[choice])
    close(joined(vae.decode_stream(latent, StreamOptions(chunk))), decoded)
    close(joined(vae.encode_stream(frames, StreamOptions(chunk))), encoded)
    fused = candidate.fused
    assert bool(candidate.tails) == fused.tail
    wan = vae.config.family != "seedvr2"
    assert bool(candidate.norms) == (fused.norm and wan)


def test_a_norm_in_place_is_read_where_it_is(truth, serving):
    """So a block runs one pass for its first norm, and none for its second."""
    vae, latent, _, decoded, _ = truth
    if vae.config.family == "seedvr2":
        pytest.skip("its norm needs the whole frame")
    calls, silu = [], RMSNorm.silu
    serving(ALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RMSNorm, "silu", lambda *a, **k: calls.append(a[0]) or silu(*a, **k))
        close(vae.decode(latent), decoded)
    blocks = [each for each in vae.decoder.modules() if isinstance(each, ResidualBlock)]
    assert blocks
    assert not {block.residual["3"] for block in blocks} & set(calls)
    assert {block.residual["0"] for block in blocks} <= set(calls)


@pytest.mark.parametrize("choice", CHOICES)
def test_memory_that_runs_out_does_not_change_the_video(truth, serving, choice, monkeypatch):
    """No convolution of several steps has enough memory, so each is computed in pieces."""
    vae, latent, frames, decoded, encoded = truth
    serving(CHOICES[choice])
    convolve, failed = CausalConv3d.convolve, []

    def failing(self, x, kind, strides, pads, cache, terms=BIAS, before=None):
        new = x.shape[2] - (0 if before else self.context)
        if kind == "volume" and self.context and new > self.stride:
            failed.append(before is not None)
            raise torch.OutOfMemoryError("no memory")
        return convolve(self, x, kind, strides, pads, cache, terms, before)

    monkeypatch.setattr(CausalConv3d, "convolve", failing)
    close(joined(vae.decode_stream(latent, StreamOptions(2))), decoded)
    assert failed
    assert any(failed) == CHOICES[choice].tail
    if vae.config.family != "seedvr2":  # its downsampling does not come in pieces
        close(joined(vae.encode_stream(frames, StreamOptions(2))), encoded)


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


def test_a_parked_tail_is_read_and_kept(serving):
    """A tail that moves to the host between two steps, or in the middle of one, is the same."""
    serving(ALL)
    check_runs(TemporalCache(), TemporalCache.park)


@pytest.mark.parametrize("choice", ["all", "nothing"])
def test_a_frame_without_memory_is_computed_in_bands_of_rows(serving, choice, monkeypatch):
    serving(CHOICES[choice])
    convolve = CausalConv3d.convolve

    def failing(self, x, kind, *arguments):
        if kind == "volume" and x.shape[3] == 5:
            raise torch.OutOfMemoryError("no memory")
        return convolve(self, x, kind, *arguments)

    monkeypatch.setattr(CausalConv3d, "convolve", failing)
    cache = TemporalCache()
    cache.workspace.relief = Relief(CPU, "a decode")
    check_runs(cache)
    assert cache.workspace.relief.done
