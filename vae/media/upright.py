"""Conversion of decoded frames to upright RGB, in 8 or in 16 bits.

Colors follow the matrix and range tags of the file as in FFmpeg, which assumes BT.601 without
tags. swscale runs with accurate rounding and interpolated chroma, at most 1 level off; its default
is up to 2 levels off, always downwards. `_target` has the numbers at which it leaves black and
white; the result differs from the exact formula by at most 0.1 level of 10 bits (FFmpeg 8.1).

It is used through PyAV's reformatter: the filter `scale` ignores where a stream has its chroma.

Floats are linear light, as in OpenEXR; the VAE expects values for a display. swscale has no such
conversion, so PyTorch applies the curve of sRGB (IEC 61966-2-1).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import ColorRange, VideoReformatter
from torch import Tensor

from .av_input import BT601, BT709, faults_name

# Flags of swscale from libswscale/swscale.h; not every PyAV names all of them. First the scaler:
# for chroma always, for luma when the size changes.
BICUBIC, AREA, LANCZOS = 0x4, 0x20, 0x200
# Full chroma interpolation in and out, and accurate rounding. Without the first, the chroma of two
# pixels is repeated; the last makes the result equal on every CPU.
EXACT = 0x2000 | 0x4000 | 0x40000
# Transfers of ISO/IEC 23091-2 that leave floats as linear light: reserved and unspecified, as in
# files of other programs, and linear.
_LINEAR = (0, 2, 8)


def upright(
    path: Path, size: tuple[int, int], scaler: int, *, deep: bool
) -> Callable[[av.VideoFrame], Tensor]:
    """Return a conversion to upright RGB `[height, width, 3]` of a size, uint8, or uint16 if deep.

    It is for a single thread.
    """
    reformatter, top = VideoReformatter(), 65535 if deep else 255

    def convert(frame: av.VideoFrame) -> Tensor:
        with faults_name(path, "has a frame that cannot be converted"):
            turns = quarter_turns(frame)
            height, width = size[::-1] if turns % 2 else size
            if "f16" in frame.format.name or "f32" in frame.format.name:
                frame = _displayed(frame)
            target, black, white = _target(frame)
            # The size may change within a stream; as in FFmpeg, that of the first frame is used.
            pixels = reformatter.reformat(
                frame,
                width=width,
                height=height,
                format=target,
                interpolation=scaler | EXACT,
                # FFmpeg 8 takes gray for full range, whatever its tag says; so `_target` does.
                src_color_range=ColorRange.JPEG if _is_gray(frame) else frame.color_range,
                dst_color_range=ColorRange.JPEG,
                # RGB has no matrix, but PyAV before 17 applies the frame's matrix only if the two
                # differ.
                dst_colorspace=BT601 if frame.colorspace == BT709 else BT709,
            ).to_ndarray()
        found = torch.from_numpy(np.ascontiguousarray(np.rot90(pixels, turns)))
        if (black, white) == (0, top):
            return found
        levels = found.float().sub_(black).mul_(top / (white - black)).clamp_(0, top).round_()
        return levels.to(torch.uint16 if deep else torch.uint8)

    return convert


def quarter_turns(frame: av.VideoFrame) -> int:
    """Return the anticlockwise turns of 90 degrees that make `frame` upright, by its tag."""
    return round(frame.rotation / 90) % 4


def bit_depth(frame: av.VideoFrame) -> int:
    """Return the bits per component of `frame`, 8 to 16; floats have 16."""
    return min(16, max([8, *(component.bits for component in frame.format.components)]))


def _is_gray(frame: av.VideoFrame) -> bool:
    return len(frame.format.components) < 3


def _target(frame: av.VideoFrame) -> tuple[str, int, int]:
    """Return the format to which swscale converts `frame`, and its numbers of black and white."""
    depth = bit_depth(frame)
    top = (1 << depth) - 1
    if depth > 8 and not (frame.format.is_rgb or _is_gray(frame)):
        # Of YUV, 16 bits keep what the matrix gives between two levels; their low bits stay zero.
        is_full = frame.color_range == ColorRange.JPEG or frame.format.name.startswith("xyz")
        return "gbrp16le", 0, top << (16 - depth) if is_full else 255 << 8
    if depth > 8 and frame.format.name.startswith("gbrap"):
        # Without the alpha, swscale 9.5 copies planes to planes short of half a row per slice.
        return "rgb48le", 0, 65535
    # Between RGB of the same depth swscale keeps all numbers. It never stretches gray of limited
    # range, as ITU-R BT.709-6 has it.
    limited = _is_gray(frame) and frame.color_range == ColorRange.MPEG
    black, white = (16 << (depth - 8), 235 << (depth - 8)) if limited else (0, top)
    return "rgb24" if depth == 8 else f"gbrp{depth}le", black, white


def _displayed(frame: av.VideoFrame) -> av.VideoFrame:
    """Convert floats of linear light with the primaries of BT.709 to 16 bits for a display."""
    # PyAV makes no array of halves.
    planes: tuple[Any, ...] = frame.planes  # buffers, which their type does not declare
    dtype = f"{'>' if frame.format.is_big_endian else '<'}f{2 if 'f16' in frame.format.name else 4}"
    count = len(frame.format.components) // len(planes)  # of a pixel in a plane
    size = frame.height, frame.width, count
    rows = [np.frombuffer(plane, dtype).reshape(frame.height, -1) for plane in planes]
    parts = [each[:, : count * frame.width].reshape(size) for each in rows]
    if len(parts) > 1:
        parts = [parts[2], *parts[:2], *parts[3:]]  # planes: G, B, R
    light = np.concatenate(parts, axis=2).astype(np.float32)
    if light.shape[2] in (2, 4):
        # OpenEXR stores colors times alpha.
        alpha = light[..., -1:]
        light = light[..., :-1] / np.where(alpha > 0, alpha, 1)
    light = torch.from_numpy(light).expand(-1, -1, 3).nan_to_num(0.0).clamp_(0, 1)
    # PyAV 14 does not have the tag.
    if int(getattr(frame, "color_trc", 0)) in _LINEAR:
        curve = 1.055 * light ** (1 / 2.4) - 0.055
        light = torch.where(light <= 0.0031308, 12.92 * light, curve)
    levels = (light * 65535).round_().numpy()
    return av.VideoFrame.from_ndarray(levels.astype(np.uint16), format="rgb48le")
