"""Which backend takes which op: asked with a small call of each, because only a call can tell."""

from dataclasses import dataclass
from pathlib import Path

import torch

from . import sample_inputs
from .backends import ORDER
from .constraints import DTYPES
from .dispatch import ask
from .errors import Refusal
from .native_ops.library import CPU

# Ops that move numbers or add them in one order: they have the bits of the reference everywhere.
EXACT = frozenset(
    ("bias_residual", "interleave_time", "merge_phases", "pixel_shuffle_3d", "frames_to_images")
)

# Frames, height and width of the calls.
_SIZE = (2, 4, 4)


@dataclass(frozen=True)
class Support:
    """What a backend says to an op.

    Attributes:
        device: "cpu" or "cuda".
        dtype: Of the activations.
        reason: Why it does not take the call; None: it does.
        exact: Its result has the bits of the reference, by the kind of the op.
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
        for op in sample_inputs.OPS
        for device in devices
        for backend in ORDER
        for dtype in DTYPES
    ]


def native_library() -> NativeLibrary:
    """Load the compiled library, or build it, and tell what there is of it."""
    try:
        CPU.load()
        instructions, missing = torch.ops.fast_video_vae.isa(), None
    except Refusal as refusal:
        instructions, missing = None, str(refusal)
    path = next(CPU.folder().glob("*.so"), None)
    return NativeLibrary(path, instructions, missing)


def _asked(op: str, device: str, backend: str, dtype: torch.dtype) -> Support:
    arguments = sample_inputs.call(op, _SIZE, dtype, torch.device(device))
    reason = None
    try:
        with torch.no_grad():
            ask(backend, op, **arguments)
    except Refusal as refusal:
        reason = str(refusal)
    exact = reason is None and (backend == "reference" or op in EXACT)
    return Support(op, backend, device, dtype, reason, exact)
