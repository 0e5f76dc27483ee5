"""Which backend takes which op: asked with a small call of each, because only a call can tell."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import build
from .backend import ORDER, Refusal, ask, use_quality

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# What the VAEs do, on a small scale: an op, and what makes a tensor of a shape.
_CALLS: dict[str, Callable[[Callable[..., Any], Callable[..., Tensor]], Any]] = {
    "rms_norm_silu": lambda op, x: op(x(1, 32, 2, 4, 4), x(32), tail=x(1, 32, 2, 4, 4)),
    "group_norm_silu": lambda op, x: op(x(1, 32, 2, 4, 4), x(32), x(32), 4),
    "rms_norm": lambda op, x: op(x(16, 32), x(32)),
    "silu_mul": lambda op, x: op(x(16, 32), x(16, 32)),
    "bias_residual": lambda op, x: op(x(1, 32, 2, 4, 4), x(32), x(1, 32, 2, 4, 4), x(32)),
    "attention": lambda op, x: op(x(1, 16, 32), x(1, 16, 32), x(1, 16, 32)),
    "interleave_time": lambda op, x: op(x(1, 64, 2, 4, 4), 2),
    "merge_phases": lambda op, x: op(x(1, 64, 2, 5, 5), x(1, 32, 1, 4, 4), 2),
    "pixel_shuffle_3d": lambda op, x: op(x(1, 12, 2, 4, 4), (1, 2, 2), "ctwh"),
    "average_down": lambda op, x: op(x(1, 32, 2, 4, 4), 64, times=2, size=2),
    "frames_to_images": lambda op, x: op(x(1, 12, 2, 4, 4), patch=2),
}


@dataclass(frozen=True)
class Support:
    """What a backend says to an op.

    Attributes:
        op: Name of the op.
        backend: Name of the backend.
        device: "cpu" or "cuda".
        dtype: Of the activations.
        reason: Why it does not take the call; None: it does.
        exact: Its result has the bits of the reference, so that it serves quality "exact" too.
    """

    op: str
    backend: str
    device: str
    dtype: torch.dtype
    reason: str | None
    exact: bool


@dataclass(frozen=True)
class NativeLibrary:
    """What there is of the compiled library.

    Attributes:
        path: Where it lies; None: there is none, or it could not be kept.
        instructions: The instruction set that its kernels use here; None: it is not loaded.
        missing: Why it is not loaded; None: it is.
    """

    path: Path | None
    instructions: str | None
    missing: str | None


def backend_matrix() -> list[Support]:
    """Ask every backend for every op, on every kind of device that is here.

    What a backend needs is built or loaded for it, which may take a minute once.

    Returns:
        An entry for each op, device, backend (fastest first) and dtype, in this order.
    """
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [
        _asked(op, device, backend, dtype)
        for op in _CALLS
        for device in devices
        for backend in ORDER
        for dtype in _DTYPES
    ]


def native_library() -> NativeLibrary:
    """Load the compiled library, or build it, and tell what there is of it."""
    try:
        build.load()
        instructions, missing = torch.ops.fast_video_vae.isa(), None
    except Refusal as refusal:
        instructions, missing = None, str(refusal)
    path = next(build.folder().glob("*.so"), None)
    return NativeLibrary(path, instructions, missing)


def _asked(op: str, device: str, backend: str, dtype: torch.dtype) -> Support:
    reason = _refusal(op, device, backend, dtype, "fast")
    exact = reason is None and _refusal(op, device, backend, dtype, "exact") is None
    return Support(op, backend, device, dtype, reason, exact)


def _refusal(op: str, device: str, backend: str, dtype: torch.dtype, quality: str) -> str | None:
    def numbers(*shape: int) -> Tensor:
        x = torch.linspace(-1, 1, torch.Size(shape).numel(), device=device).to(dtype).view(shape)
        return x.contiguous(memory_format=torch.channels_last_3d) if x.ndim == 5 else x

    try:
        with torch.no_grad(), use_quality(quality):
            _CALLS[op](partial(ask, backend, op), numbers)
    except Refusal as refusal:
        return str(refusal)
    return None
