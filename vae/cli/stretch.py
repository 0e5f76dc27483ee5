"""What a command takes of a video: which part, at which rate and size; and how it says so."""

import argparse
import math
from fractions import Fraction
from typing import Any

from ..media.video_reader import VideoFile
from ..models.config import VAEConfig
from .loading import Say

# What a CPU gets where the user has not said more: with the bundled VAE half a minute of work (one
# thread of an AMD EPYC does 0.3 million pixels per second there and back, 2026-11).
CPU_PIXELS = 12_000_000
CPU_AREA = 640 * 360
# Fewer frames show nothing of the motion.
LEAST_FRAMES = 5


def stretch_named(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `VideoFile.pieces`; without `size` those of `VideoFile.estimate`."""
    return {
        "fps": args.fps,
        "start": args.start,
        "duration": args.duration,
        "limit": args.frames_limit,
        "size": args.size,
    }


def estimated(video: VideoFile, stretch: dict[str, Any]) -> int | None:
    """How many frames of a stretch the file announces; None: it does not say."""
    return video.estimate(**{key: value for key, value in stretch.items() if key != "size"})


def cropped(
    video: VideoFile, config: VAEConfig, size: tuple[int, int] | None, say: Say
) -> tuple[int, int]:
    """Height and width that a VAE takes of a video; says what the video is, and what is cropped."""
    step = config.spatial_compression
    full = size or (video.height, video.width)
    height, width = video.cropped_size(step, size)
    count = f"{frames_label(video.estimated_frames)}, " if video.estimated_frames else ""
    say(f"{video.path.name}: {count}{video.width}x{video.height}, {fps_label(video.fps)} fps")
    if (height, width) != full:
        say(f"note: cropped about the centre to {width}x{height}, multiples of {step}")
    return height, width


def affordable(
    video: VideoFile, config: VAEConfig, wanted: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Cut a video down to what a CPU does in about half a minute, as far as nothing else was said.

    Of the `wanted` of `stretch_named` a `size` stays, and so does the length with a `duration` or a
    `limit`. Returns such arguments, and what to say of the difference; "": there is none.
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
        count = estimated(video, wanted)
        if count is None or count > kept:
            changed["limit"] = kept
            frames = f"{kept} of {count} frames" if count else f"at most {kept} frames"
            notes.append(f"{frames} (--duration, --frames-limit)")
    if not notes:
        return changed, ""
    return changed, f"on a CPU the demo takes {' and '.join(notes)}; these options take more"


def frames_label(count: int) -> str:
    """Such as "9 frames"."""
    return f"{count} frame{'' if count == 1 else 's'}"


def fps_label(fps: Fraction) -> str:
    """Such as "29.97"."""
    return f"{float(fps):.3f}".rstrip("0").rstrip(".")
