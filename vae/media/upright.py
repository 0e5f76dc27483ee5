"""Conversion of decoded frames to upright RGB, in 8 or in 16 bits.

Colors follow the matrix and range tags of the file as in FFmpeg, which assumes BT.601 without
tags. swscale runs with accurate rounding and interpolated chroma, at most 1 level off; its default
is up to 2 levels off, always downwards.

In 16 bits swscale fills the low bits of few formats: white of YUV with limited range becomes
`255 << 8`, and white of 10-bit YUV with full range `1023 << 6`. `_filled` scales that to 65535. The
result differs from the exact formula by at most 0.1 level of 10 bits (FFmpeg 7.1 and 8.1).

Floats are linear light, as in OpenEXR; the VAE expects values for a display. swscale has no such
conversion, so PyTorch applies the curve of sRGB (IEC 61966-2-1).
"""

import logging
import re
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
_FLOAT = re.compile(r"f(16|32)(?:le|be)$")
# Pixels up to this many times as wide as high, or as high as wide, occur in files.
_WIDEST_PIXEL = 10


class Upright:
    """Converts frames to upright RGB of one size."""

    def __init__(
        self, path: Path, height: int, width: int, scaler: int = BICUBIC, *, deep: bool = False
    ) -> None:
        """Set the upright size; `deep`: convert to 16 bits. One object serves one thread."""
        self._path = path
        self._size = (height, width)
        self._flags = scaler | EXACT
        self._deep = deep
        self._reformatter = VideoReformatter()

    def __call__(self, frame: av.VideoFrame) -> Tensor:
        """Convert `frame` to `[height, width, 3]` uint8 in 0-255, or uint16 in 0-65535 if deep."""
        with faults_name(self._path, "has a frame that cannot be converted"):
            turns = quarter_turns(frame)
            picture = self._converted(frame, *(self._size[::-1] if turns % 2 else self._size))
            if not self._deep:
                found = torch.from_numpy(picture)
                return torch.rot90(found, turns) if turns else found
            # PyTorch rotates no uint16, so the same bits are rotated as int16.
            found = torch.from_numpy(picture.view(np.int16))
            return (torch.rot90(found, turns) if turns else found).view(torch.uint16)

    def _converted(self, frame: av.VideoFrame, height: int, width: int) -> np.ndarray:
        if _FLOAT.search(frame.format.name):
            frame = _displayed(frame)
        deep = bit_depth(frame) > 8
        span = frame.color_range
        if _is_gray(frame):
            span = ColorRange.JPEG  # as FFmpeg 8 does; `_stretched` follows the tag
        # The size may change within a stream; as in FFmpeg, the size of the first frame is used.
        rgb = self._reformatter.reformat(
            frame,
            width=width,
            height=height,
            format="rgb48le" if deep else "rgb24",
            interpolation=self._flags,
            src_color_range=span,
            dst_color_range=ColorRange.JPEG,
            # RGB has no matrix, but PyAV before 17 applies the frame's matrix only if the two
            # differ.
            dst_colorspace=BT601 if frame.colorspace == BT709 else BT709,
        ).to_ndarray()
        if deep:
            resized = (frame.width, frame.height) != (width, height)
            rgb = _filled(rgb, _filled_bits(frame, resized=resized))
        if _is_gray(frame) and frame.color_range == ColorRange.MPEG:
            rgb = _stretched(rgb, bit_depth(frame))
        if deep == self._deep:
            return rgb
        if deep:
            return ((rgb.astype(np.int32) * 255 + 32767) // 65535).astype(np.uint8)
        # A frame of 8 bits in a stream of more.
        return rgb.astype(np.uint16) * np.uint16(257)


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


def _filled_bits(frame: av.VideoFrame, *, resized: bool) -> int:
    """Return how many high bits of 16 swscale fills for the format of `frame`."""
    depth = bit_depth(frame)
    if frame.format.is_rgb:
        # swscale repeats the bits of planes; if it resizes, it shifts them.
        return 16 if len(frame.planes) > 1 and not resized else depth
    full = frame.color_range == ColorRange.JPEG or _is_gray(frame)
    return depth if full or frame.format.name.startswith("xyz") else 8


def _filled(picture: np.ndarray, bits: int) -> np.ndarray:
    """Scale `picture` `[H, W, 3]` uint16, in place, so that `bits` ones and zeros become 65535."""
    if bits < 16:
        np.minimum(picture, 0x10000 - (1 << (16 - bits)), out=picture)
        picture += picture >> bits
    return picture


def _stretched(picture: np.ndarray, bits: int) -> np.ndarray:
    """Convert gray of `bits` from limited to full range, by ITU-R BT.709-6; swscale never does.

    `picture` is `[H, W, 3]`, converted as if the range were full.
    """
    top, step = np.iinfo(picture.dtype).max, 1 << (bits - 8)
    codes = picture.astype(np.float32) * (((1 << bits) - 1) / top)
    unit = ((codes - 16 * step) / (219 * step)).clip(0, 1)
    return np.rint(unit * top).astype(picture.dtype)


def _displayed(frame: av.VideoFrame) -> av.VideoFrame:
    """Convert floats of linear light with the primaries of BT.709 to 16 bits for a display."""
    name = frame.format.name
    planes: tuple[Any, ...] = frame.planes  # buffers, which their type does not declare
    order = ">" if frame.format.is_big_endian else "<"
    dtype = f"{order}f{2 if '16' in name else 4}"
    values = len(frame.format.components) // len(planes)  # of a pixel in a plane
    parts = []
    for plane in planes:
        rows = np.frombuffer(plane, dtype).reshape(frame.height, -1)[:, : values * frame.width]
        parts.append(rows.reshape(frame.height, frame.width, values))
    pixels = np.concatenate(parts, axis=2)
    if _is_gray(frame):
        pixels = pixels[..., [0, 0, 0]]
    else:
        alpha = pixels[..., 3:]
        pixels = pixels[..., [2, 0, 1] if len(planes) > 1 else [0, 1, 2]]  # planes: G, B, R
        if alpha.shape[-1]:
            # OpenEXR stores colors times alpha.
            pixels = pixels.astype(np.float32) / np.where(alpha > 0, alpha, 1)
    light = torch.from_numpy(pixels.astype(np.float32)).nan_to_num_(0.0).clamp_(0, 1)
    # PyAV 14 does not have the tag.
    if int(getattr(frame, "color_trc", 0)) in _LINEAR:
        curve = 1.055 * light ** (1 / 2.4) - 0.055
        light = torch.where(light <= 0.0031308, 12.92 * light, curve)
    levels = (light * 65535).round_().numpy()
    return av.VideoFrame.from_ndarray(levels.astype(np.uint16), format="rgb48le")
