"""Pictures of a video as frames of an encoder: depth, dither, color conversion and tags.

Video formats get the BT.709 matrix in limited range; RGB formats keep the values. Both are tagged
with the transfer function of sRGB, as the frames of a VAE are pictures for a display. ProRes has no
code for it and is tagged BT.709. EXR holds linear light by convention.

Eight bits are dithered in order: by swscale with the color conversion, and here for RGB, with
thresholds from a Weyl sequence in two dimensions. They are evenly distributed along rows, columns
and diagonals, so the mean over 16 x 16 pixels of a slope in any direction is within 0.03 levels;
with the matrix of Bayer it is within 0.24 (2026-11).
"""

from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any

import av
import numpy
import torch
from av.video.reformatter import ColorRange, VideoReformatter
from torch import Tensor

from .av_input import BT709
from .upright import BICUBIC, EXACT

# Code points of ISO/IEC 23091-2: the matrix of RGB, and the transfer function of sRGB.
IDENTITY, SRGB = 0, 13
# The largest value of a picture by dtype.
WHITE = {torch.uint8: 255, torch.uint16: 65535}
# Steps of the thresholds, which no small numbers of pixels repeat.
GOLDEN, SILVER = (5**0.5 - 1) / 2, 2**0.5 - 1
_FLOATS = ("gbrpf32le", "gbrapf32le")


def convert_pictures(pictures: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert `[T, H, W, C]` uint8, uint16 or floats in [0, 1] to uint8, uint16 or float32.

    uint8 drops fractions as ComfyUI's save nodes do; uint16 is rounded.
    """
    if pictures.dtype == dtype and dtype in WHITE:
        return pictures
    if pictures.dtype == torch.uint8 and dtype == torch.uint16:
        return (pictures.int() * 257).to(dtype)
    if pictures.dtype == torch.uint16 and dtype == torch.uint8:
        return (pictures.int() * 255).div(65535, rounding_mode="floor").to(dtype)
    unit = (pictures.float() / WHITE.get(pictures.dtype, 1)).nan_to_num_(0).clamp_(0, 1)
    if dtype not in WHITE:
        return unit.to(dtype)
    scaled = unit.mul_(WHITE[dtype])
    return (scaled if dtype == torch.uint8 else scaled.round_()).int().to(dtype)


def with_channels(frames: Tensor, channels: int) -> Tensor:
    """Return frames `[B, C, t, H, W]` with 3 or 4 `channels`; a missing alpha is opaque."""
    if frames.shape[1] == channels:
        return frames
    if frames.shape[1] > channels:
        return frames[:, :channels]
    white = 1 if frames.is_floating_point() else torch.iinfo(frames.dtype).max
    return torch.cat([frames, torch.full_like(frames[:, :1], white)], dim=1)


def dithered(picture: numpy.ndarray) -> numpy.ndarray:
    """Reduce `[H, W, C]` uint16 to uint8 by ordered dithering; values that 8 bits hold stay."""
    threshold = _thresholds(*picture.shape[:2])[..., None]
    return ((picture.astype(numpy.int32) * 255 + threshold) // 65535).astype(numpy.uint8)


def linear(pictures: Tensor) -> Tensor:
    """Return the linear light of `[..., C]` by IEC 61966-2-1, times alpha as in OpenEXR.

    It is rounded to the nearest half float, because FFmpeg truncates to it.
    """
    colors, alpha = pictures[..., :3], pictures[..., 3:]
    light = ((colors + 0.055) / 1.055).pow(2.4)
    light = torch.where(colors <= 0.04045, colors / 12.92, light)
    if alpha.shape[-1]:
        light = torch.cat([light * alpha, alpha], dim=-1)
    return light.half().float()


def picture_dtype(pixel_format: str, bit_depth: int, dither: bool) -> torch.dtype:
    """Return the dtype of pictures that a pixel format needs: float32, uint16 or uint8."""
    if pixel_format in _FLOATS:
        return torch.float32
    return torch.uint16 if bit_depth > 8 or dither else torch.uint8


class FrameMaker:
    """Makes frames of one pixel format from pictures."""

    def __init__(
        self, codec: str, pixel_format: str, bit_depth: int, dither: bool, fps: Fraction
    ) -> None:
        self._format, self._bit_depth, self._fps = pixel_format, bit_depth, fps
        self._is_yuv = pixel_format.startswith(("yuv", "nv12", "p010"))
        # Code points of ISO/IEC 23091-2 by the names of the attributes in PyAV.
        self.tags: dict[str, int] = {
            "colorspace": BT709 if self._is_yuv else IDENTITY,
            "color_primaries": BT709,
            "color_trc": BT709 if codec.startswith("prores") else SRGB,
            "color_range": ColorRange.MPEG if self._is_yuv else ColorRange.JPEG,
        }
        self._dtype = picture_dtype(pixel_format, bit_depth, dither)
        self._reformatter = VideoReformatter()

    def __call__(self, picture: Tensor, index: int) -> av.VideoFrame:
        """Return the frame `index` of the video with tags and time from a `picture` `[H, W, C]`."""
        is_final = self._bit_depth == 8 and picture.dtype == torch.uint8
        pixels = convert_pictures(picture, torch.uint8 if is_final else self._dtype)
        if self._format in _FLOATS:
            rgb = linear(pixels).numpy()
            frame = av.VideoFrame.from_ndarray(rgb, format=self._format)
        elif self._is_yuv:
            frame = self._video(pixels.numpy())
        else:
            frame = self._exact(pixels.numpy())
        # Some encoders use the tags of the frame. PyAV before 17 lacks them; players assume BT.709.
        for name, value in self.tags.items():
            with suppress(AttributeError):
                setattr(frame, name, value)
        frame.pts, frame.time_base = index, 1 / self._fps
        return frame

    def _video(self, pixels: numpy.ndarray) -> av.VideoFrame:
        frame = _packed(pixels)
        if pixels.dtype == numpy.uint16:
            # The white of swscale is 255 * 256, except of alpha. From 16 to 8 bits it dithers.
            plane: Any = frame.planes[0]  # a buffer, which its type does not declare
            values = numpy.frombuffer(plane, numpy.uint16)
            values = values.reshape(-1, 4)[:, :3] if pixels.shape[-1] == 4 else values
            values -= values >> 8
        return self._reformatter.reformat(
            frame,
            format=self._format,
            dst_colorspace=BT709,
            dst_color_range=ColorRange.MPEG,
            interpolation=BICUBIC | EXACT,
        )

    def _exact(self, pixels: numpy.ndarray) -> av.VideoFrame:
        """Move RGB values to another layout; swscale changes none of them at the same depth."""
        if pixels.dtype == numpy.uint16 and self._bit_depth == 8:
            pixels = dithered(pixels)
        elif pixels.dtype == numpy.uint16 and self._bit_depth < 16:
            # swscale drops the lower bits.
            top = (1 << self._bit_depth) - 1
            wide = (pixels.astype(numpy.int32) * top + 32767) // 65535
            pixels = (wide << (16 - self._bit_depth)).astype(numpy.uint16)
        return self._reformatter.reformat(_packed(pixels), format=self._format)


def _packed(pixels: numpy.ndarray) -> av.VideoFrame:
    """Return a frame of `[H, W, C]` uint8 or uint16."""
    names = ("rgb24", "rgba") if pixels.dtype == numpy.uint8 else ("rgb48le", "rgba64le")
    return av.VideoFrame.from_ndarray(pixels, format=names[pixels.shape[-1] - 3])


@lru_cache(maxsize=1)
def _thresholds(height: int, width: int) -> numpy.ndarray:
    """Return thresholds `[height, width]` in 0-65534."""
    rows, columns = numpy.ogrid[:height, :width]
    sequence = columns * GOLDEN + rows * SILVER
    return ((sequence - numpy.floor(sequence)) * 65535).astype(numpy.int32)
