"""A candidate for convolutions that fuses a chosen set of terms, in plain PyTorch."""

import torch
import torch.nn.functional as F

from fast_video_vae.kernels import Fused, backends, modules
from fast_video_vae.vae.models import base

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

    def refuse(self, x):
        pass

    def launches(self):
        return {"conv3d": self._conv3d}

    def fuses(self, weight):
        return self.fused

    def _conv3d(self, x, weight, bias, *others):
        residual, residual_bias, gamma, tail, out, stride, padding, _ = others
        fused = self.fused
        assert tail is None or fused.tail
        assert fused.sums or (residual, residual_bias, gamma, out) == (None,) * 4
        self.tails += tail is not None
        window, taps = x if tail is None else torch.cat([tail, x], dim=2), weight.plain()
        taps = taps.unsqueeze(2) if taps.ndim == 4 else taps
        y, dtype = F.conv3d(window, taps, None, stride, (0, *padding)), x.dtype
        for each in (bias, residual_bias):
            y = y if each is None else y + each.view(1, -1, 1, 1, 1)
        y = y if residual is None else y + residual
        if gamma is not None:
            self.norms += 1
            y = F.normalize(y, dim=1, eps=1e-12) * y.shape[1] ** 0.5 * gamma.view(1, -1, 1, 1, 1)
            y = F.silu(y)
        if out is not None:
            return out.copy_(y)
        return y.to(dtype, memory_format=torch.channels_last_3d)


def serve(patch, choice):
    """Let a candidate serve all convolutions, and return it."""
    candidate = Candidate(CHOICES[choice])
    patch.setitem(modules._loaded, "sliced", candidate)
    patch.setattr(base, "route_conditions", lambda _: candidate)  # kept routes are of others
    patch.setattr(backends, "CONVOLUTION_ORDER", ("sliced", "reference"))
    return candidate
