"""A candidate for convolutions that fuses a chosen set of terms, in plain PyTorch."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from fast_video_vae.kernels import Fused, backends, modules
from fast_video_vae.vae.layers import conv

ALL = Fused(tail=True, sums=True, norm=True, bias=True)
CHOICES = {
    "all": ALL,
    "tail": Fused(tail=True),
    "tail and sums": Fused(tail=True, sums=True, bias=True),
    "norm without tail": Fused(sums=True, norm=True, bias=True),
    "nothing": Fused(),
}


class Candidate:
    """A candidate that counts how it is called."""

    def __init__(self, fused):
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

    def _finished(self, y, bias, residual=None, residual_bias=None, gamma=None, out=None):
        assert self.fused.sums or (residual, residual_bias, gamma, out) == (None,) * 4
        ones, dtype = [1] * (y.ndim - 2), y.dtype
        for each in (bias, residual_bias):
            y = y if each is None else y + each.view(1, -1, *ones)
        y = y if residual is None else y + residual
        if gamma is not None:
            self.norms += 1
            y = F.normalize(y, dim=1, eps=1e-12) * y.shape[1] ** 0.5 * gamma.view(1, -1, *ones)
            y = F.silu(y)
        order = torch.channels_last if y.ndim == 4 else torch.channels_last_3d
        return y.to(dtype, memory_format=order) if out is None else out.copy_(y)


def serve(patch, choice):
    """Let a candidate serve all convolutions, and return it."""
    candidate = Candidate(CHOICES[choice])
    names = SimpleNamespace(**{k: getattr(candidate, k) for k in ("fuses", "conv2d", "conv3d")})
    patch.setitem(modules._loaded, "sliced", names)
    patch.setattr(conv, "route_token", lambda: candidate)  # kept routes are of others
    patch.setattr(backends, "CONVOLUTION_ORDER", ("sliced", "reference"))
    return candidate
