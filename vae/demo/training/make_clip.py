"""Makes the bundled clip: `python -m fast_video_vae.vae.demo.training.make_clip`.

A zoom on a cat's face while a rocket in a round frame crosses it: two photographs that the bundled
VAE was not trained on, slow and fast motion, sharp edges and fur.
"""

import argparse
import logging
import math
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from av.video.reformatter import Colorspace
from torch import Tensor

from .. import CLIP_PATH
from .pictures import HELD_OUT, cut, load_picture, pyramid

FRAMES, FPS, SIZE = 33, 16, 256
BADGE = 96.0  # diameter of the round frame in pixels

logger = logging.getLogger(__name__)


def draw() -> Tensor:
    """Draw the frames of the clip, `[33, 3, 256, 256]` in [0, 1]."""
    cat, rocket = (load_picture(picture) for picture in HELD_OUT)
    time = torch.linspace(0.0, 1.0, FRAMES)
    eased = time * time * (3.0 - 2.0 * time)
    frames = cut(
        pyramid(cat), _between((248.0, 149.0, 1.16, 0.0), (196.0, 142.0, 0.92, -0.06), eased), SIZE
    )
    # The window of the rocket follows the round frame, so that the rocket stays within it.
    x = _mix(-60.0, SIZE + 60.0, eased)
    y = 196.0 - 26.0 * torch.sin(math.pi * time)
    scale = 3.0
    across, down = 312.0 - (x - SIZE / 2) * scale, 262.0 - (y - SIZE / 2) * scale
    windows = torch.stack([across, down, torch.full_like(x, scale), 0 * x], 1)
    inlay = cut(pyramid(rocket), windows, SIZE)
    axis = torch.arange(SIZE) + 0.5
    distance = torch.hypot(
        axis[None, None, :] - x[:, None, None], axis[None, :, None] - y[:, None, None]
    )
    rim = (BADGE / 2 + 3.0 - distance + 0.5).clamp(0.0, 1.0)[:, None]
    inside = (BADGE / 2 - distance + 0.5).clamp(0.0, 1.0)[:, None]
    return torch.lerp(torch.lerp(frames, torch.full_like(frames, 0.93), rim), inlay, inside)


def write(frames: Tensor, path: Path) -> None:
    """Write `frames`, `[T, 3, H, W]` in [0, 1], to `path` as H.264 in BT.709."""
    pictures = (frames * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(FPS))
        stream.width, stream.height = SIZE, SIZE
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "10", "preset": "veryslow"}
        # 1 is BT.709 in each of the three; 1 is the limited range.
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = context.color_range = 1
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _between(start: tuple[float, ...], end: tuple[float, ...], part: Tensor) -> Tensor:
    """Interpolate windows of `cut`, `[T, 4]`."""
    return torch.stack([_mix(a, b, part) for a, b in zip(start, end, strict=True)], 1)


def _mix(start: float, end: float, part: Tensor) -> Tensor:
    return start + (end - start) * part


def main() -> None:
    """Write the clip to its default path or to `--out`."""
    parser = argparse.ArgumentParser(description="Make the bundled clip.")
    parser.add_argument("--out", type=Path, default=CLIP_PATH)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    write(draw(), args.out)
    logger.info("%s: %d bytes", args.out, args.out.stat().st_size)


if __name__ == "__main__":
    main()
