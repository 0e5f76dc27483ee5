"""Our VAE with one idea taken out or put in: each a context to decode in.

They reach into the package from outside, so that it has no switches for their sake.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fast_video_vae.kernels import use_backend
from fast_video_vae.vae.layers import cudnn
from fast_video_vae.vae.layers.causal_conv import CausalConv3d, Fill
from fast_video_vae.vae.layers.conv import Conv
from fast_video_vae.vae.layers.resample_conv import UpsampleConv2d
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.models import wan_blocks as layers
from fast_video_vae.vae.planning import plan

from .attention import IMPLEMENTATIONS
from .conv import nearest_then_conv
from .rows import Missing
from .session import Session


@dataclass(frozen=True)
class Variant:
    """One change, as the context in which the VAE decodes."""

    name: str
    change: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    chunk: int | None = None  # latents per step; None: as chosen
    lone: bool = True  # it changes something for a video of one frame
    plans: bool = False  # it changes cuDNN's plans, and so needs a thread of its own


def variants(session: Session, vae: Any) -> list[Variant]:
    """All of them."""
    part = "_DEVICE_PART_BYTES" if session.cuda else "_CPU_PART_BYTES"
    size = getattr(plan, part)
    upsample, causal = UpsampleConv2d.forward, CausalConv3d.forward
    return [
        Variant("every op by PyTorch (no Triton)", functools.partial(use_backend, "reference")),
        Variant("cuDNN searches each shape", lambda: cudnn.searching(session.device), plans=True),
        Variant("cuDNN never searches", _without_search, plans=True),
        Variant(
            "upsampling not folded",
            lambda: replaced(UpsampleConv2d, "forward", _unfolded(upsample)),
        ),
        Variant(
            "each convolution adds its bias",
            lambda: replaced(Conv, "adds_bias_late", lambda self, x: False),
        ),
        Variant(
            "first frame as 3D, zeros before it",
            lambda: replaced(CausalConv3d, "forward", _first_as_volume(causal)),
        ),
        Variant(
            "NCDHW convolutions, copied there and back",
            lambda: replaced(cudnn, "convolve", _channels_first(cudnn.convolve)),
        ),
        Variant("1 latent a step", chunk=1, lone=False),
        Variant("4 latents a step", chunk=4, lone=False),
        Variant("all latents in a step", chunk=-1, lone=False),
        Variant("parts a quarter as large", lambda: replaced(plan, part, size // 4), lone=False),
        Variant("parts four times as large", lambda: replaced(plan, part, size * 4), lone=False),
        Variant("CUDA graphs", functools.partial(_with_graphs, vae), lone=False),
        *(
            Variant(f"attention: {name}", functools.partial(replaced, layers, "attention", one))
            for name, one in IMPLEMENTATIONS.items()
        ),
    ]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value, and the old one back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _with_graphs(vae: Any) -> Iterator[None]:
    if not hasattr(vae, "graphs"):
        raise Missing("this VideoVAE has no attribute `graphs`")
    with replaced(vae, "graphs", True):
        yield


@contextlib.contextmanager
def _without_search() -> Iterator[None]:
    def nothing(device: torch.device) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    switches: Any = torch.backends.cudnn
    with replaced(cudnn, "searching", nothing), replaced(switches, "benchmark", False):
        yield


def _unfolded(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        self: UpsampleConv2d,
        x: Tensor,
        cache: TemporalCache | None = None,
        source: Tensor | None = None,
        times: int = 1,
    ) -> Tensor:
        if source is not None:
            return forward(self, x, cache, source, times)
        return nearest_then_conv(self, x)

    return run


def _first_as_volume(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        self: CausalConv3d,
        x: Tensor,
        cache: TemporalCache,
        fill: Fill | None = None,
        residual: Tensor | None = None,
        residual_bias: Tensor | None = None,
        *,
        biased: bool = True,
    ) -> Tensor:
        if not cache.first:
            return forward(self, x, cache, fill, residual, residual_bias, biased=biased)
        if fill is not None:
            filled = cache.scratch(x.shape, x)
            fill(x, out=filled)
            x = filled
        cache.keep(self, self.context, x)
        batch, channels, frames, height, width = x.shape
        window = x.new_zeros(batch, self.context + frames, height, width, channels).movedim(-1, 1)
        window[:, :, self.context :] = x
        return self.convolve(
            window, "volume", (self.stride, 1, 1), (self.padding, self.padding), cache, residual,
            residual_bias, biased=biased,
        )  # fmt: skip

    return run


def _channels_first(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
    ) -> Tensor:
        y = convolve(x.contiguous(), weight.contiguous(), bias, stride, padding)
        order = torch.channels_last if y.ndim == 4 else torch.channels_last_3d
        return y.contiguous(memory_format=order)

    return run
