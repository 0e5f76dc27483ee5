"""Conversion of decoded frames to upright RGB, in 8 or in 16 bits.

Colors follow the matrix and range tags of the file as in FFmpeg, which assumes BT.601 without
tags. swscale runs with accurate rounding and interpolated chroma, at most 1 level off; its default
is up to 2 levels off, always downwards. `_range_of` has the numbers at which it leaves black and
white; the result differs from the exact formula by at most 0.1 level of 10 bits (FFmpeg 8.1).

It is used through PyAV's reformatter: the filter `scale` ignores where a stream has its chroma.

Floats are linear light, as in OpenEXR; the VAE expects values for a display. swscale has no such
conversion, so PyTorch applies the curve of sRGB (IEC 61966-2-1).
"""

import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import ColorRange, VideoReformatter
from av.video.stream import VideoStream
from torch import Tensor

from .av_input import BT601, BT709, faults_name

LOG = logging.getLogger(__name__)

# Flags of swscale from libswscale/swscale.h; not every PyAV names all of them. First the scaler:
# for chroma always, for luma when the size changes.
BICUBIC, AREA, LANCZOS = 0x4, 0x20, 0x200
# Full chroma interpolation in and out, and accurate rounding. Without the first, the chroma of two
# pixels is repeated; the last makes the result equal on every CPU.
EXACT = 0x2000 | 0x4000 | 0x40000
# Transfers of ISO/IEC 23091-2 that leave floats as linear light: reserved and unspecified, as in
# files of other programs, and linear.
_LINEAR = (0, 2, 8)
# Pixels up to this many times as wide as high, or as high as wide, occur in files.
_WIDEST_PIXEL = 10


class Upright:
    """Converts frames to upright RGB of one size."""

    def __init__(
        self, path: Path, height: int, width: int, scaler: int = BICUBIC, *, deep: bool = False
    ) -> None:
        """Set the upright size; `deep`: convert to 16 bits. One object serves one thread."""
        self._path, self._size, self._deep = path, (height, width), deep
        self._flags = scaler | EXACT
        self._reformatter = VideoReformatter()

    def __call__(self, frame: av.VideoFrame) -> Tensor:
        """Convert `frame` to `[height, width, 3]` uint8 in 0-255, or uint16 in 0-65535 if deep."""
        with faults_name(self._path, "has a frame that cannot be converted"):
            turns = quarter_turns(frame)
            height, width = self._size[::-1] if turns % 2 else self._size
            if _is_float(frame):
                frame = _displayed(frame)
            # The size may change within a stream; as in FFmpeg, that of the first frame is used.
            pixels = self._reformatter.reformat(
                frame,
                width=width,
                height=height,
                format=_target(frame),
                interpolation=self._flags,
                # FFmpeg 8 takes gray for full range, whatever its tag says; so `_range_of` does.
                src_color_range=ColorRange.JPEG if _is_gray(frame) else frame.color_range,
                dst_color_range=ColorRange.JPEG,
                # RGB has no matrix, but PyAV before 17 applies the frame's matrix only if the two
                # differ.
                dst_colorspace=BT601 if frame.colorspace == BT709 else BT709,
            ).to_ndarray()
        found = torch.from_numpy(np.ascontiguousarray(np.rot90(pixels, turns)))
        (black, white), top = _range_of(frame), 65535 if self._deep else 255
        if (black, white) == (0, top):
            return found
        levels = found.float().sub_(black).mul_(top / (white - black)).clamp_(0, top).round_()
        return levels.to(torch.uint16 if self._deep else torch.uint8)


def quarter_turns(frame: av.VideoFrame) -> int:
    """Return the anticlockwise turns of 90 degrees that make `frame` upright, by its tag."""
    return round(frame.rotation / 90) % 4


def bit_depth(frame: av.VideoFrame) -> int:
    """Return the bits per component of `frame`, 8 to 16; floats have 16."""
    return min(16, max([8, *(component.bits for component in frame.format.components)]))


def pixel_ratio(stream: VideoStream) -> Fraction:
    """Return the width of a pixel of `stream` over its height; 1 if unknown or absurd."""
    found = stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio
    ratio = Fraction(found) if found else Fraction(1)
    if Fraction(1, _WIDEST_PIXEL) <= ratio <= _WIDEST_PIXEL:
        return ratio
    LOG.debug("Fast Video VAE: a pixel aspect ratio of %s is ignored", ratio)
    return Fraction(1)


def scaler_for(size: tuple[int, int], shown: tuple[int, int], stored: tuple[int, int]) -> int:
    """Return swscale's flag for a resize; `shown` is in square pixels, `stored` in the file's."""
    if size == stored:
        return BICUBIC
    # The mean over areas does not interpolate a side that grows, as one of pixels that are not
    # square can.
    shrinks = size[0] < shown[0] and size[0] <= stored[0] and size[1] <= stored[1]
    return AREA if shrinks else LANCZOS


def _is_gray(frame: av.VideoFrame) -> bool:
    return len(frame.format.components) < 3


def _is_float(frame: av.VideoFrame) -> bool:
    return "f16" in frame.format.name or "f32" in frame.format.name


def _target(frame: av.VideoFrame) -> str:
    """Return the format to which swscale converts `frame`.

    Between RGB of the same depth it keeps all numbers. Of YUV, 16 bits keep what the matrix gives
    between two levels.
    """
    depth = bit_depth(frame)
    if depth == 8:
        return "rgb24"
    return f"gbrp{depth}le" if frame.format.is_rgb or _is_gray(frame) else "gbrp16le"


def _range_of(frame: av.VideoFrame) -> tuple[int, int]:
    """Return the numbers of black and white in `_target` of `frame`."""
    depth, full = bit_depth(frame), frame.color_range == ColorRange.JPEG
    top = (1 << depth) - 1
    if _is_gray(frame):
        # swscale never stretches gray of limited range, as ITU-R BT.709-6 has it.
        limited = frame.color_range == ColorRange.MPEG
        return (16 << (depth - 8), 235 << (depth - 8)) if limited else (0, top)
    if frame.format.is_rgb or depth == 8:
        return 0, top
    # The low bits stay zero.
    return 0, top << (16 - depth) if full or frame.format.name.startswith("xyz") else 255 << 8


def _displayed(frame: av.VideoFrame) -> av.VideoFrame:
    """Convert floats of linear light with the primaries of BT.709 to 16 bits for a display."""
    light = _floats(frame)
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


def _floats(frame: av.VideoFrame) -> np.ndarray:
    """Return the components of a frame of floats, `[H, W, C]`, which PyAV cannot do for halves."""
    planes: tuple[Any, ...] = frame.planes  # buffers, which their type does not declare
    dtype = f"{'>' if frame.format.is_big_endian else '<'}f{2 if 'f16' in frame.format.name else 4}"
    count = len(frame.format.components) // len(planes)  # of a pixel in a plane
    parts = [
        np.frombuffer(plane, dtype).reshape(frame.height, -1)[:, : count * frame.width]
        for plane in planes
    ]
    if len(parts) > 1:
        parts = [parts[2], *parts[:2], *parts[3:]]  # planes: G, B, R
    shape = frame.height, frame.width, -1
    return np.concatenate([part.reshape(shape) for part in parts], axis=2).astype(np.float32)
