"""Support of each op by each backend, found by running a small call of each."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import shapes
from .backends import CONVOLUTIONS, ORDER
from .constraints import DTYPES
from .convolution.weight import ConvWeight
from .cuda_ops.compiler import compiler
from .devices import default_device
from .errors import Refusal
from .modules import ask
from .native_ops.build import CPU
from .ready import sample_inputs

# Ops that only move values or add them in one order: bit-identical on all backends.
EXACT = frozenset(
    ("bias_residual", "interleave_time", "merge_phases", "pixel_shuffle_3d", "frames_to_images")
)

# Frames, height and width of the calls.
_SIZE = (2, 4, 4)

# Channels of the call of a convolution.
_CHANNELS = 96


class Support(NamedTuple):
    """Support of an op by a backend, or by a candidate of a convolution."""

    op: str
    backend: str
    device: str  # type, such as "cpu" or "cuda"
    dtype: torch.dtype
    reason: str | None  # why the backend does not support the call; None: it does
    exact: bool  # the result is bit-identical to the reference's


class NativeLibrary(NamedTuple):
    """State of the compiled library."""

    path: Path | None  # None: it is not built or could not be saved
    instructions: str | None  # instruction set of its kernels; None: it is not loaded
    missing: str | None  # why it is not loaded; None: it is


def backend_matrix() -> list[Support]:
    """Run every op on every backend and every kind of device of this machine."""
    # Libraries are built or loaded for it, which can take a minute the first time.
    devices = list(dict.fromkeys(("cpu", default_device().type)))
    ops = [*((op, ORDER) for op in sample_inputs.OPS), ("conv3d", CONVOLUTIONS)]
    return [
        _support(op, device, backend, dtype)
        for op, names in ops
        for device in devices
        for backend in names
        for dtype in DTYPES
    ]


def native_library() -> NativeLibrary:
    """Load the compiled library, or build it, and return its state."""
    try:
        CPU.load()
        instructions, missing = torch.ops.fast_video_vae.isa(), None
    except Refusal as refusal:
        instructions, missing = None, str(refusal)
    path = next(CPU.folder().glob("*.so"), None)
    return NativeLibrary(path, instructions, missing)


def gpu_compiler() -> str:
    """Return the compiler of the backend `cuda` with its version, or "none" and why."""
    if os.environ.get("FAST_VIDEO_VAE_CUDA") == "0":
        return "not used (FAST_VIDEO_VAE_CUDA=0 disables cuda)"
    try:
        return f"{compiler().version}; cuda needs no Triton and no toolkit, also on Windows"
    except Refusal as refusal:
        return f"none for GPUs ({refusal})"


def _support(op: str, device: str, backend: str, dtype: torch.dtype) -> Support:
    place = torch.device(device)
    try:
        with torch.no_grad():
            args = _convolution(dtype, place) if op == "conv3d" else None
            ask(backend, op, *(args or sample_inputs.call(op, _SIZE, dtype, place)))
    except Refusal as refusal:
        return Support(op, backend, device, dtype, str(refusal), exact=False)
    return Support(op, backend, device, dtype, None, backend == "reference" or op in EXACT)


def _convolution(dtype: torch.dtype, device: torch.device) -> list[Any]:
    """Return the arguments of a 3x3x3 convolution of `[1, C, 4, 4, 4]` without terms."""
    like = torch.zeros((), dtype=dtype, device=device)
    x = shapes.new_video(like, (1, _CHANNELS, 4, 4, 4)).zero_()
    weight = shapes.new_video(like, (_CHANNELS, _CHANNELS, 3, 3, 3)).zero_()
    return [x, ConvWeight.of(weight), *(None,) * 6, (1, 1, 1), (0, 0), 0]
