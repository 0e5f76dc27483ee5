"""The VIDEOs of `DecodeVideo`, and the source of the frames of any VIDEO.

Facts about ComfyUI here are from comfy_api/latest/_input_impl/video_types.py of 0.33. A VIDEO from
a file has a stream source and a trim window in seconds; any other would be encoded for a stream
source, so its tensors are used instead. `VideoFromFile` keeps the depth of a file, but its colors
are up to four levels of 10 bits too dark. It writes no ProRes to mp4, and tags RGB that it encodes
with the matrix of RGB, which players believe and the encoder of AV1 refuses.
"""

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import av
import torch
from torch import Tensor

from ...vae.media import VideoFile, convert_pictures, read_video
from ..host.api import Input, InputImpl, Types
from .source import FileSource, Fit, Images, Source, Tensors

_Container, _Codec = Types.VideoContainer, Types.VideoCodec

# Seconds by which a frame may be early for the start of a trim window, as in files.
_SLACK = Fraction(6, 10000)


def source_of(video: Input.Video) -> Source:
    """Return the frames of a VIDEO, a file with its trim window or tensors, read on demand."""
    if isinstance(video, ImageSequence):
        width, height = video.get_dimensions()
        return Tensors((len(video.paths), height, width, 3), video.read, video.get_frame_rate())
    if type(video).get_stream_source is Input.Video.get_stream_source:
        found = video.get_components()
        images, fps = found.images, Fraction(found.frame_rate)
        return Tensors(images.shape, images.__getitem__, fps, found.audio)
    return FileSource(video)


class FileVideo(InputImpl.VideoFromFile):
    """A video file whose frames of more than 8 bits are read exactly, and saved as they are."""

    @cached_property
    def _stream(self) -> tuple[str, av.VideoFormat]:
        with av.open(self.get_stream_source()) as container:
            stream = container.streams.video[0]
            return stream.codec.canonical_name, stream.format

    def get_components(self) -> Types.VideoComponents:
        """Return the frames as an IMAGE, sound and rate; those with alpha as ComfyUI reads them."""
        if self.get_bit_depth() == 8 or any(each.is_alpha for each in self._stream[1].components):
            return super().get_components()
        source = FileSource(self)
        images = torch.stack([*Images(source, Fit())])
        return Types.VideoComponents(images, source.fps, source.sound(Fit()))

    def save_to(
        self,
        path: Any,  # noqa: ANN401, as ComfyUI's
        format: Types.VideoContainer = _Container.AUTO,
        codec: Types.VideoCodec = _Codec.AUTO,
        metadata: dict | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Copy the stream if the container takes it, else encode it with the depth of the file."""
        name, pixels = self._stream
        is_whole = not any(self.get_active_trim_window())
        is_free = codec == _Codec.AUTO and all(each is None for each in options.values())
        is_matroska = format in (_Container.AUTO, _Container.MKV)
        if pixels.is_rgb and not (is_whole and is_free and is_matroska):
            _frame_by_frame(self).save_to(path, format, codec, metadata, **options)
            return
        if name == "prores" and codec == _Codec.AUTO and format != _Container.WEBM:
            codec = _Codec.H264
        super().save_to(path, format, codec, metadata, **options)

    def as_trimmed(self, *args: Any, **kwargs: Any) -> Input.Video | None:  # noqa: ANN401
        """Return a part of the video, or None if it is shorter than a strict duration."""
        trimmed = super().as_trimmed(*args, **kwargs)
        if trimmed is not None:
            start, duration = trimmed.get_active_trim_window()
            trimmed = FileVideo(self.get_stream_source(), start_time=start, duration=duration)
        return trimmed


class ImageSequence(Input.Video):
    """Images by number, without their alpha, which are read on demand."""

    def __init__(self, paths: Iterable[Path], fps: Fraction) -> None:
        self.paths = sorted(paths, key=lambda path: (len(path.name), path.name))
        self._fps = fps

    @cached_property
    def _first(self) -> VideoFile:
        return read_video(self.paths[0])

    def read(self, numbers: Iterable[int]) -> Tensor:
        """Return the images of some `numbers`, `[n, H, W, 3]` float32 in [0, 1]."""
        pictures = (next(read_video(self.paths[number]).frames()) for number in numbers)
        return torch.cat([convert_pictures(picture[None], torch.float32) for picture in pictures])

    def get_components(self) -> Types.VideoComponents:
        """Return all images as an IMAGE `[N, H, W, 3]` float32, and the frame rate."""
        return Types.VideoComponents(self.read(range(len(self.paths))), self._fps)

    def save_to(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, as ComfyUI's
        """Encode the images to a file, with ComfyUI's arguments."""
        _frame_by_frame(self).save_to(*args, **kwargs)

    def as_trimmed(
        self, start_time: float = 0, duration: float = 0, strict_duration: bool = False
    ) -> Input.Video | None:
        """Return the images of a part of the video; None: there are none, or a strict one ends."""
        begin = Fraction(start_time)
        if begin < 0:  # from the end
            begin = max(Fraction(0), len(self.paths) / self._fps + begin)
        end = begin + Fraction(duration) if duration else math.inf
        times = ((path, number / self._fps + _SLACK) for number, path in enumerate(self.paths))
        shown = [path for path, time in times if begin <= time < end]
        is_short = strict_duration and len(shown) / self._fps + _SLACK < duration
        return ImageSequence(shown, self._fps) if shown and not is_short else None

    def get_dimensions(self) -> tuple[int, int]:
        """Return width and height in pixels."""
        return self._first.width, self._first.height

    def get_bit_depth(self) -> int:
        """Return the bits per component."""
        return self._first.bit_depth

    def get_frame_count(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def get_frame_rate(self) -> Fraction:
        """Return the frames per second."""
        return self._fps

    def get_duration(self) -> float:
        """Return the duration in seconds."""
        return float(len(self.paths) / self._fps)


# ComfyUI's encoder reads the shape of an IMAGE and its frames in order.
def _frame_by_frame(video: Input.Video) -> Input.Video:
    """Return a VIDEO that ComfyUI encodes from frames that are read on demand."""
    source, depth = source_of(video), min(10, video.get_bit_depth())
    parts = Types.VideoComponents(Images(source, Fit()), source.fps, source.sound(Fit()))
    return InputImpl.VideoFromComponents(parts, bit_depth=depth)
