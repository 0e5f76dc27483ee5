"""The frames of a VIDEO, a few at a time, from a file or from tensors.

Facts about ComfyUI here are from comfy_api/latest/_input_impl/video_types.py of 0.33: a VIDEO from
a file has a stream source and a trim window in seconds. Any other VIDEO would be encoded for a
stream source, so its tensors are used instead.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, BinaryIO

import av
import comfy.utils
import torch
from torch import Tensor

from ...vae.media import VideoFile, open_media, read_video
from ..host.api import Input
from .sequence import ImageSequence

_logger = logging.getLogger(__name__)

# Frames of a piece: those of a latent. A longer piece would not be faster.
_FRAMES = 4

Sound = dict[str, Any]


@dataclass(frozen=True)
class Fit:
    """The requested form of a video."""

    fps: Fraction | None = None  # by repeating and dropping frames; None: all frames
    size: tuple[int, int] | None = None  # the picture covers it; the rest is cropped
    multiple: int = 1  # height and width are then cropped about the center to multiples
    limit: int | None = None  # most frames

    def seconds(self, fps: Fraction) -> Fraction | None:
        """Return the seconds of the frames within the limit at `fps`; None: unlimited."""
        return None if self.limit is None else self.limit / (self.fps or fps)


def source_of(video: Input.Video) -> "Source":
    """Return the frames of a VIDEO, a file with its trim window or tensors, read on demand."""
    if isinstance(video, ImageSequence):
        return _Tensors(video, None, video.get_frame_rate())
    if type(video).get_stream_source is Input.Video.get_stream_source:
        found = video.get_components()
        return _Tensors(found.images, found.audio, Fraction(found.frame_rate))
    return FileSource(video)


def shape_of(size: tuple[int, int], width: int, height: int) -> tuple[int, int] | None:
    """Return the requested height and width, 0: from the aspect ratio; None: neither is given."""
    if not width and not height:
        return None
    own_height, own_width = size
    return (
        height or max(1, round(own_height * width / own_width)),
        width or max(1, round(own_width * height / own_height)),
    )


def as_images(piece: Tensor) -> Tensor:
    """Convert a piece `[1, C, t, H, W]` of a video to an IMAGE `[t, H, W, C]`."""
    if piece.is_floating_point():
        unit = (piece + 1) / 2
    else:
        unit = piece.float() / torch.iinfo(piece.dtype).max
    return unit[0].movedim(0, -1)


class FileSource:
    """The frames of a file, given by path or in memory; `size` is in square pixels, upright."""

    def __init__(self, video: Input.Video) -> None:
        self._source: str | BinaryIO = video.get_stream_source()
        start, duration = video.get_active_trim_window()
        self._start, self._duration = start, duration or None
        self._file: VideoFile = read_video(self._source)
        self.fps = self._file.fps
        self.size = self._file.height, self._file.width

    def pieces(self, fit: Fit) -> Iterator[Tensor]:
        """Yield `[1, C, t, H, W]` in the form of `fit`, uint8, or uint16 for more than 8 bits."""
        return self._file.pieces(
            multiple=fit.multiple,
            frames=_FRAMES,
            fps=fit.fps,
            size=fit.size,
            start=self._start,
            duration=self._duration,
            limit=fit.limit,
        )

    def estimate(self, fit: Fit) -> int | None:
        """Return the number of frames in the form of `fit`; None: unknown."""
        return self._file.estimate(
            fps=fit.fps, start=self._start, duration=self._duration, limit=fit.limit
        )

    def sound(self, fit: Fit) -> Sound | None:
        """Return the AUDIO of the frames in the form of `fit`; None: there is none."""
        lengths = [each for each in (self._duration, fit.seconds(self.fps)) if each is not None]
        begin = self._file.origin + Fraction(self._start)
        end = begin + Fraction(min(lengths)) if lengths else None
        if not isinstance(self._source, str):
            self._source.seek(0)
        return _read_sound(self._source, begin, end)


class _Tensors:
    """An IMAGE, or a folder, with a rate and sound, with the interface of `FileSource`."""

    def __init__(
        self, images: "Tensor | ImageSequence", audio: Sound | None, fps: Fraction
    ) -> None:
        self._images, self._audio, self.fps = images, audio, fps
        if len(images.shape) != 4 or not all(images.shape):
            raise ValueError(f"its images are {list(images.shape)}; expected [N, H, W, C]")
        self.size = tuple(images.shape[1:3])

    def pieces(self, fit: Fit) -> Iterator[Tensor]:
        height, width = (side - side % fit.multiple for side in fit.size or self.size)
        if not height or not width:
            wanted = f", requested as {fit.size[1]}x{fit.size[0]}" if fit.size else ""
            raise ValueError(
                f"it is {self.size[1]}x{self.size[0]}{wanted}; "
                f"expected at least {fit.multiple}x{fit.multiple}"
            )
        return self._cut(fit, height, width)

    def _cut(self, fit: Fit, height: int, width: int) -> Iterator[Tensor]:
        count = self.estimate(fit)
        for at in range(0, count, _FRAMES):
            shown = range(at, min(at + _FRAMES, count))
            images = self._images[[self._shown(index, fit) for index in shown]]
            frames = images.movedim(-1, 1).float()
            if fit.size is not None and fit.size != self.size:
                method = "area" if fit.size[0] < self.size[0] else "lanczos"
                frames = comfy.utils.common_upscale(frames, *fit.size[::-1], method, "center")
            top, left = (frames.shape[2] - height) // 2, (frames.shape[3] - width) // 2
            frames = frames[:, :, top : top + height, left : left + width]
            yield (frames * 2 - 1).movedim(0, 1).unsqueeze(0)

    def _shown(self, index: int, fit: Fit) -> int:
        """Return the frame nearest in time, the earlier of two, as for a file."""
        if fit.fps is None:
            return index
        nearest = math.ceil(index * self.fps / fit.fps - Fraction(1, 2))
        return min(nearest, len(self._images) - 1)

    def estimate(self, fit: Fit) -> int:
        count = len(self._images)
        if fit.fps is not None:
            count = max(1, math.ceil(count * fit.fps / self.fps))
        return count if fit.limit is None else min(count, fit.limit)

    def sound(self, fit: Fit) -> Sound | None:
        seconds = fit.seconds(self.fps)
        if self._audio is None or seconds is None:
            return self._audio
        rate = int(self._audio["sample_rate"])
        return self._audio | {"waveform": self._audio["waveform"][..., : round(seconds * rate)]}


Source = FileSource | _Tensors


def _read_sound(source: str | BinaryIO, begin: Fraction, end: Fraction | None) -> Sound | None:
    """Return the AUDIO of a file between two times of its clock."""
    with open_media(source) as container:
        # Streams that FFmpeg cannot decode have no context. ComfyUI also uses the last of the
        # others.
        streams = [each for each in container.streams.audio if each.codec_context and each.rate]
        if not streams:
            return None
        stream = streams[-1]
        rate = stream.rate
        length = None if end is None else round((end - begin) * rate)
        blocks = [torch.zeros(stream.channels, 0)]
        at = 0
        try:
            if begin > 0:
                container.seek(int(begin * av.time_base))
            for place, block in _blocks(container.decode(stream), rate):
                if len(blocks) == 1:
                    at = place - round(begin * rate)
                    # Sound that starts late keeps its place.
                    blocks.append(torch.zeros(len(block), max(0, at)))
                blocks.append(block[:, max(0, -at) :])
                at += block.shape[1]
                if length is not None and at >= length:
                    break
        except av.error.FFmpegError as error:
            _logger.warning(
                "Fast Video VAE: the audio is broken after %.2f s: %s", at / rate, error
            )
    waveform = torch.cat(blocks[1:] or blocks, dim=1)
    return {"waveform": waveform[:, :length].unsqueeze(0), "sample_rate": rate}


def _blocks(frames: Iterator[av.AudioFrame], rate: int) -> Iterator[tuple[int, Tensor]]:
    """Yield sound `[channels, n]` float32 and its place in samples; only the first is used."""
    resampler = av.AudioResampler(format="fltp")
    for frame in frames:
        for part in resampler.resample(frame):
            seconds = 0 if part.pts is None else part.pts * part.time_base
            yield round(seconds * rate), torch.from_numpy(part.to_ndarray())
