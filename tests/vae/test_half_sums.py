"""A decode with sums in float16 that are promoted to float32 is as exact as the plain bfloat16."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.kernels import Fused, backends, modules
from fast_video_vae.tests.benchmarks.weights import random_weights
from fast_video_vae.vae import load_vae

# Products that a tensor core sums exactly before it rounds, and products of a sum in float16.
EXACT, PROMOTED = 8, 64


def promoted(rows, taps):
    """Multiply `[M, K]` and `[K, N]` as a tensor core that sums in float16, promoted in float32."""
    total = torch.zeros(len(rows), taps.shape[1])
    for start in range(0, len(taps), PROMOTED):
        narrow = torch.zeros_like(total, dtype=torch.float16)
        for at in range(start, min(start + PROMOTED, len(taps)), EXACT):
            part = rows[:, at : at + EXACT].float() @ taps[at : at + EXACT].float()
            narrow = (narrow.float() + part).half()
        total += narrow.float()
    return total


def fuses(x, weight, stride, padding, *, norm):
    return Fused(tail=True, sums=True, bias=True)


def conv3d(x, weight, bias=None, *, stride, padding, tail=None, residual=None, out=None, **_):
    window = x if tail is None else torch.cat([tail, x], dim=2)
    high, wide = padding
    cells = F.pad(window, (wide, wide, high, high)).movedim(1, -1)
    taps = weight.plain().movedim(1, -1)  # [N, kt, kh, kw, C]
    for axis, (length, step) in enumerate(zip(taps.shape[1:4], stride, strict=True), 1):
        cells = cells.unfold(axis, length, step)
    cells = cells.movedim(4, -1)  # [B, T, H, W, kt, kh, kw, C]
    table = taps.flatten(1).T
    frames = [
        promoted(frame.reshape(-1, len(table)), table).view(*frame.shape[:2], -1)
        for frame in cells.flatten(0, 1)
    ]
    y = torch.stack(frames).unflatten(0, cells.shape[:2]).movedim(-1, 1)
    y = y if bias is None else y + bias.float().view(-1, 1, 1, 1)
    y = (y if residual is None else y + residual.float()).to(x.dtype)
    return y.contiguous(memory_format=torch.channels_last_3d) if out is None else out.copy_(y)


def conv2d(x, weight, bias=None, *, stride, padding, residual=None, out=None, **_):
    taps = SimpleNamespace(plain=lambda: weight.plain().unsqueeze(2))
    video = functools.partial(torch.unsqueeze, dim=2)
    added = None if residual is None else video(residual)
    y = conv3d(video(x), taps, bias, stride=(1, *stride), padding=padding, residual=added)
    y = y.squeeze(2).contiguous(memory_format=torch.channels_last)
    return y if out is None else out.copy_(y)


def decibels(actual, expected):
    """The signal next to the error."""
    error = (actual.double() - expected).square().mean()
    return 10 * torch.log10(expected.square().mean() / error).item()


@pytest.mark.slow
def test_a_decode_with_promoted_sums_is_as_exact_as_bfloat16(monkeypatch):
    state = random_weights("wan2.1", 96, 96)
    latent = torch.randn(1, 16, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    exact = load_vae(state, dtype=torch.float32).decode(latent).double()
    plain = decibels(load_vae(state, dtype=torch.bfloat16).decode(latent), exact)
    candidate = SimpleNamespace(fuses=fuses, conv2d=conv2d, conv3d=conv3d)
    monkeypatch.setitem(modules._loaded, "sliced", candidate)
    monkeypatch.setattr(backends, "CONVOLUTION_ORDER", ("sliced",))
    half = decibels(load_vae(state, dtype=torch.float16).decode(latent), exact)
    assert half >= plain + 10, f"float16 has {half:.1f} dB, bfloat16 {plain:.1f} dB"
