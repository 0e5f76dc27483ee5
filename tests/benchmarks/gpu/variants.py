"""This pack's VAE with one optimisation removed or added, each as a context manager.

They patch the package from outside, so that it needs no switches for benchmarks.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fast_video_vae.kernels import Fused, use_backend
from fast_video_vae.kernels.convolution import aten
from fast_video_vae.vae.layers.resample_conv import UpsampleConv2d
from fast_video_vae.vae.planning import candidates

from .conv import unfolded
from .session import Session


@dataclass(frozen=True)
class Variant:
    """One change, as the context in which the VAE decodes."""

    name: str
    change: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    chunk: int | None = None  # latents per step; None: chosen by the plan
    single_frame: bool = True  # it affects a video of one frame
    plans: bool = False  # it changes cuDNN's plans, so it runs in its own thread


def variants(session: Session, vae: Any) -> list[Variant]:
    """Return the variants of `vae` for the device of `session`, what decides most first."""
    part = "_DEVICE_PART_BYTES" if session.cuda else "_CPU_PART_BYTES"
    size = getattr(candidates, part)
    parts = {"a quarter as large": size // 4, "four times as large": size * 4}
    found = [
        Variant(
            f"parts {much}",
            functools.partial(replaced, candidates, part, value),
            single_frame=False,
        )
        for much, value in parts.items()
    ]
    found += [
        Variant("cuDNN searches each shape", lambda: replaced(vae, "searches", True), plans=True),
        Variant("CUDA graphs", lambda: replaced(vae, "graphs", True), single_frame=False),
        Variant(
            "ends of 3 and 12 channels not filled up",
            lambda: replaced(aten, "_ALIGNED", ()),
        ),
        Variant("1 latent per step", chunk=1, single_frame=False),
        Variant(
            "1 latent per step, no rings",
            lambda: replaced(candidates.Candidate, "_rings", False),
            chunk=1,
            single_frame=False,
        ),
        Variant("4 latents per step", chunk=4, single_frame=False),
        Variant("all latents in one step", chunk=-1, single_frame=False),
        Variant("every op by PyTorch (no Triton)", functools.partial(use_backend, "reference")),
        Variant(
            "upsampling not folded",
            lambda: replaced(UpsampleConv2d, "forward", lambda conv, x, *_: unfolded(conv, x)),
        ),
        Variant(
            "each convolution adds its bias",
            lambda: replaced(aten, "fuses", lambda *_, **__: Fused(bias=True)),
        ),
    ]
    return found


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set the attribute `name` of `owner` to `value` within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
