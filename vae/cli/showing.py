"""What `fast-video-vae demo` takes of a video, and where it puts what it makes of it."""

import hashlib
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL.PngImagePlugin import PngInfo

from ..media.video_reader import VideoFile
from ..models.config import VAEConfig

# What to say of the bundled VAE.
TOY = (
    "the bundled VAE is a toy that blurs; --vae FILE takes a real one, such as "
    "wan_2.1_vae.safetensors"
)

# What a CPU gets where the user has not said more: with the bundled VAE half a minute of work (one
# thread of an AMD EPYC does 0.3 million pixels per second there and back, 2026-11).
CPU_PIXELS = 12_000_000
CPU_AREA = 640 * 360
# Fewer frames show nothing of the motion.
LEAST_FRAMES = 5

# The words in a picture's metadata before the digest of the path of its video.
_KEY = "fast-video-vae demo of"
# Metadata comes first in a PNG file.
_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Outputs:
    """The files of one video.

    Attributes:
        movie: The decoded video.
        picture: The contact sheet, a PNG file.
        tags: Its metadata, which says what video it belongs to.
    """

    movie: Path
    picture: Path
    tags: PngInfo


def outputs_of(folder: Path, video: Path) -> Outputs:
    """Choose names: those that this very path had before, or else the first that are free.

    Args:
        folder: Where the files go.
        video: The source.

    Returns:
        `x_decoded.mp4` and `x_sheet.png` for `x.mp4`; `x_2_decoded.mp4` and so on where those are
        of another video called x.
    """
    digest = hashlib.sha256(str(video.resolve()).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    for number in itertools.count(1):
        stem = video.stem if number == 1 else f"{video.stem}_{number}"
        movie, picture = folder / f"{stem}_decoded.mp4", folder / f"{stem}_sheet.png"
        free = not (movie.exists() or picture.exists())
        if free or _tagged(picture, digest):
            break
    tags = PngInfo()
    tags.add_text(_KEY, digest)
    return Outputs(movie, picture, tags)


def affordable(
    video: VideoFile, config: VAEConfig, wanted: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Cut a video down to what a CPU does in about half a minute, as far as nothing else was said.

    Args:
        video: The source.
        config: Of the VAE.
        wanted: Keyword arguments of `VideoFile.pieces`: `fps`, `size`, `start`, `duration` and
            `limit`. A `size` stays, and so does the length with a `duration` or a `limit`.

    Returns:
        Such arguments, and what to say of the difference; "": there is none.
    """
    changed, notes = dict(wanted), []
    height, width = wanted["size"] or (video.height, video.width)
    if not wanted["size"] and height * width > CPU_AREA:
        shrink, step = math.sqrt(CPU_AREA / (height * width)), config.spatial_compression
        height, width = (max(step, int(side * shrink) // step * step) for side in (height, width))
        changed["size"] = height, width
        notes.append(f"{width}x{height} instead of {video.width}x{video.height} (--size)")
    if wanted["duration"] is None and wanted["limit"] is None:
        kept = config.frames(
            config.latent_frames(max(LEAST_FRAMES, CPU_PIXELS // (height * width)))
        )
        stretch = {key: value for key, value in wanted.items() if key != "size"}
        count = video.estimate(**stretch)
        if count is None or count > kept:
            changed["limit"] = kept
            frames = f"{kept} of {count} frames" if count else f"at most {kept} frames"
            notes.append(f"{frames} (--duration, --frames-limit)")
    if not notes:
        return changed, ""
    return changed, f"on a CPU the demo takes {' and '.join(notes)}; these options take more"


def peak_bytes(device: torch.device) -> int | None:
    """Peak of the memory so far: of the GPU where it works there, else of this process.

    None on Windows, where Python's own library does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # noqa: PLC0415, not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _tagged(picture: Path, digest: str) -> bool:
    try:
        with picture.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return f"{_KEY}\0{digest}".encode() in head
