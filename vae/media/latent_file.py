"""The file format of a latent.

It is a safetensors file with one float32 tensor `latent`, `[1, C_latent, t, h, w]`, not normalised.
Its metadata holds text for the decoder: `format` (version of this layout), `family`, `fps`,
`frames`, `height`, `width`. Files of ComfyUI's SaveLatent are read too; they are not normalised
either.
"""

import os
import re
import stat
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors.torch import save
from torch import Tensor

from ...kernels import Header, guarded, read_header, shown

FORMAT_VERSION = "fast-video-vae 1"
# The key of this pack, of ComfyUI's LATENT, and of files of ComfyUI's SaveLatent.
LATENT_KEYS = ("latent", "samples", "latent_tensor")
# A narrow form: Fraction would expand 1e999999999 to a billion digits.
_FPS = re.compile(r"\d{1,9}([./]\d{1,9})?", re.ASCII)


@dataclass(frozen=True)
class LatentFile:
    """The content of a latent file; None: unknown."""

    latent: Tensor  # `[1, C_latent, t, h, w]`, not normalised, in the dtype of the file
    family: str | None
    fps: Fraction | None


def save_latent(
    path: Path, latent: Tensor, *, family: str, fps: Fraction, frames: int, compression: int = 8
) -> None:
    """Write `latent`, `[1, C_latent, t, h, w]`, with metadata; `compression`: pixels per latent."""
    height, width = (compression * size for size in latent.shape[3:])
    numbers = {"fps": fps, "frames": frames, "height": height, "width": width}
    metadata = {"format": FORMAT_VERSION, "family": family}
    metadata |= {name: str(number) for name, number in numbers.items()}
    tensor = latent.detach().to("cpu", torch.float32).contiguous()
    # Not save_file: its errors name its own temporary file instead of the path.
    path.write_bytes(save({LATENT_KEYS[0]: tensor}, metadata))


def load_latent(path: Path) -> LatentFile:
    """Read a latent file of this pack or of ComfyUI."""
    with guarded(str(path)):
        if not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):
            raise ValueError("it is a device; expected a latent file")
        with path.open("rb") as file:
            header = read_header(file, os.fstat(file.fileno()).st_size)
            latent = _read_latent(file, header)
        fps = header.metadata.get("fps")
        if fps is not None and not (_FPS.fullmatch(fps) and Fraction(fps)):
            raise ValueError(f"{path} gives its fps as {shown(fps)!r}; expected a number")
        family = header.metadata.get("family")
    return LatentFile(latent, family and shown(family), Fraction(fps) if fps else None)


def _read_latent(file: BinaryIO, header: Header) -> Tensor:
    """Return the latent tensor of an open file."""
    key = next((key for key in LATENT_KEYS if key in header.places), None)
    if key is None:
        names = [shown(name, 30) for name in list(header.places)[:2]]
        raise ValueError(f"it has the tensors {names}; expected one named latent")
    _, shape, (first, last) = place = header.places[key]
    dtype = place.torch_dtype
    if len(shape) != 5 or shape[0] != 1 or not all(shape) or dtype is None:
        found = f"{list(shape)}" if dtype else f"of dtype {shown(place.dtype)}"
        raise ValueError(f"its latent is {found}; expected [1, C, t, h, w]")
    numbers = bytearray(last - first)
    file.seek(header.start + first)
    if file.readinto(numbers) != len(numbers):  # type: ignore[attr-defined]
        raise ValueError("it was replaced while it was read; run it again")
    return torch.frombuffer(numbers, dtype=dtype).view(shape)
