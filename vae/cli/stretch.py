"""The part of a video that a command reads, its frame rate and size, and the lines about it."""

import argparse
import math
from fractions import Fraction
from typing import Any

from ..media.video_reader import VideoFile
from ..models.config import VAEConfig
from .loading import Say

# Default work on a CPU in pixels: about half a minute with the bundled VAE (one thread of an AMD
# EPYC encodes and decodes 0.3 million pixels per second, 2026-11).
CPU_PIXELS = 12_000_000
CPU_AREA = 640 * 360
# Fewer frames show no motion.
LEAST_FRAMES = 5


def stretch_named(args: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments of `VideoFile.pieces` from `args`; without `size`, of `estimate`."""
    return {
        "fps": args.fps,
        "start": args.start,
        "duration": args.duration,
        "limit": args.frames_limit,
        "size": args.size,
    }


def estimated(video: VideoFile, stretch: dict[str, Any]) -> int | None:
    """Return the declared number of frames of `video` in `stretch`; None: unknown."""
    return video.estimate(**{key: value for key, value in stretch.items() if key != "size"})


def cropped(
    video: VideoFile, config: VAEConfig, size: tuple[int, int] | None, say: Say
) -> tuple[int, int]:
    """Return the height and width that a VAE encodes; print the video's size and the crop."""
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
    """Reduce a video to about half a minute of work on a CPU, unless its length or size is given.

    Returns the arguments, and a note about the reduction; "": none.
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
    return changed, f"on a CPU the demo uses {' and '.join(notes)}; these options change it"


def frames_label(count: int) -> str:
    """Format `count` as in "9 frames"."""
    return f"{count} frame{'' if count == 1 else 's'}"


def fps_label(fps: Fraction) -> str:
    """Format `fps` as in "29.97"."""
    return f"{float(fps):.3f}".rstrip("0").rstrip(".")
