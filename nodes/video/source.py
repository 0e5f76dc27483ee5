"""The frames of a VIDEO, a few at a time, from a file or from tensors."""

import io
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import comfy.utils
import torch
from av.container import InputContainer
from torch import Tensor

from ...vae import media
from ..host.api import Input

_logger = logging.getLogger(__name__)

# Frames of a piece: those of a latent. A longer piece would not be faster.
_FRAMES = 4
# More frames than a video has.
_UNKNOWN = 1 << 31
# Seconds by which the times of sound differ from its samples where it pauses: times are rounded,
# and a packet has 20 ms or more.
_PAUSE_S = 0.015
# Tags of a container, which are not about the video in it.
_OF_CONTAINERS = ("major_brand", "minor_version", "compatible_brands", "encoder", "duration")

Sound = dict[str, Any]


@contextmanager
def about_video() -> Iterator[None]:
    """Put the name of the input before the message of an error of the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"video: {error}") from None
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"video: {error}") from error


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


def shape_of(size: tuple[int, int], width: int, height: int) -> tuple[int, int] | None:
    """Return the requested height and width, 0: from the aspect ratio; None: neither is given."""
    if not width and not height:
        return None
    own_height, own_width = size
    return (
        height or max(1, round(own_height * width / own_width)),
        width or max(1, round(own_width * height / own_height)),
    )


class Images:
    """The frames of a source in the form of `fit`, one by one: `[H, W, C]` in [0, 1]."""

    def __init__(self, source: "Source", fit: Fit) -> None:
        """`shape` is that of an IMAGE of all; a number of frames that is unknown is a large one."""
        self._source, self._fit = source, fit
        self.shape = (source.estimate(fit) or _UNKNOWN, *(fit.size or source.size), 3)

    def __iter__(self) -> Iterator[Tensor]:
        for images in self._source.images(self._fit):
            yield from images


class FileSource:
    """The frames of a file, given by path or in memory; `size` is in square pixels, upright."""

    def __init__(self, video: Input.Video) -> None:
        source: str | io.BytesIO = video.get_stream_source()
        # Each source has a place of its own in a file in memory, whose bytes are not copied.
        self._source = source if isinstance(source, str) else io.BytesIO(source.getvalue())
        start, duration = video.get_active_trim_window()
        self._window = {"start": start, "duration": duration or None}
        self._file = media.read_video(self._source)
        self.fps, self.size = self._file.fps, (self._file.height, self._file.width)

    def pieces(self, fit: Fit) -> Iterator[Tensor]:
        """Yield `[1, C, t, H, W]` in the form of `fit`, uint8, or uint16 for more than 8 bits."""
        return self._file.pieces(frames=_FRAMES, **vars(fit), **self._window)

    def images(self, fit: Fit) -> Iterator[Tensor]:
        """Yield the same as IMAGEs."""
        pieces = (piece[0].movedim(0, -1) for piece in self.pieces(fit))
        return (each.float() / torch.iinfo(each.dtype).max for each in pieces)

    def estimate(self, fit: Fit) -> int | None:
        """Return the number of frames in the form of `fit`; None: unknown."""
        return self._file.estimate(fps=fit.fps, limit=fit.limit, **self._window)

    def sound(self, fit: Fit) -> Sound | None:
        """Return the AUDIO of the frames in the form of `fit`; None: there is none."""
        track = self.track(fit, as_written=False)
        if track is None:
            return None
        waveform = torch.cat([torch.zeros(track.channels, 0), *track.blocks()], dim=1)
        return {"waveform": waveform.unsqueeze(0), "sample_rate": track.sample_rate}

    def track(self, fit: Fit, *, as_written: bool = True) -> "Track | None":
        """Return the sound of the frames, to be read in blocks; None: there is none.

        With `as_written` channels that files of this pack have no layout for are mixed down.
        """
        lengths = [self._window["duration"], fit.seconds(self.fps)]
        seconds = min([each for each in lengths if each is not None], default=None)
        begin = self._file.origin + Fraction(self._window["start"])
        with self._opened() as container:
            stream = _heard(container)
            if stream is None:
                return None
            layout, rate = stream.codec_context.layout, stream.rate
        if as_written:
            layout = av.AudioLayout(media.layout_of(layout.nb_channels))
        length = None if seconds is None else round(Fraction(seconds) * rate)
        return Track(self._opened, layout, rate, begin, length)

    def tags(self) -> dict[str, str]:
        """Return the tags of the file that are not about its container."""
        with self._opened() as container:
            return {k: v for k, v in container.metadata.items() if k.lower() not in _OF_CONTAINERS}

    def _opened(self) -> InputContainer:
        if not isinstance(self._source, str):
            self._source.seek(0)
        return media.open_media(self._source)


@dataclass(frozen=True)
class Track:
    """The sound of a file from `begin` on, in seconds by its clock, which is read in blocks."""

    opened: Callable[[], InputContainer]
    layout: av.AudioLayout
    sample_rate: int
    begin: Fraction
    length: int | None  # samples; None: all

    @property
    def channels(self) -> int:
        """The number of channels."""
        return self.layout.nb_channels

    def blocks(self) -> Iterator[Tensor]:
        """Yield `[channels, n]` float32, in step with the times of the file.

        Sound that starts late keeps its place, and silence fills pauses, such as those of broken
        packets, which are logged.
        """
        end = _UNKNOWN**2 if self.length is None else self.length
        done, least = 0, round(_PAUSE_S * self.sample_rate)  # samples from `begin` on; a pause
        following: int | None = None  # where the block before ends
        for start, block in self._decoded():
            begin = start
            if begin is None or (following is not None and abs(begin - following) < least):
                begin = following or 0
            following = begin + block.shape[1]
            if begin > done:
                yield torch.zeros(self.channels, min(begin, end) - done)
            heard = block[:, max(0, done - begin) : max(0, end - begin)]
            done = min(end, max(done, begin)) + heard.shape[1]
            if heard.shape[1]:
                yield heard
            if done >= end:
                return

    def _decoded(self) -> Iterator[tuple[int | None, Tensor]]:
        """Yield blocks, and the sample from `begin` on where each is by its time, if it has one."""
        form, resample, broken = None, None, False
        with self.opened() as container:
            if self.begin > 0:
                container.seek(int(self.begin * av.time_base))
            for packet in container.demux(_heard(container)):
                try:
                    frames: Any = packet.decode()
                except av.error.FFmpegError as error:
                    if not broken:
                        at = float((packet.pts or 0) * (packet.time_base or 0) - self.begin)
                        text = "Fast Video VAE: the audio is broken at %.2f s: %s"
                        _logger.warning(text, at, error)
                    broken = True
                    continue
                for frame in frames:
                    found = frame.format.name, frame.layout.name, frame.sample_rate
                    if form != found:
                        form, rate = found, self.sample_rate
                        resample = av.AudioResampler("fltp", self.layout, rate).resample
                    start = None
                    if frame.pts is not None:
                        moment = frame.pts * frame.time_base
                        start = round(moment * rate) - round(self.begin * rate)
                    for number, each in enumerate(resample(frame)):
                        yield None if number else start, torch.from_numpy(each.to_ndarray())


def _heard(container: InputContainer) -> Any:  # noqa: ANN401, a stream of PyAV
    """Return the audio stream that ComfyUI uses too, the last one; None: there is none."""
    # Streams that FFmpeg cannot decode have no context.
    streams = [each for each in container.streams.audio if each.codec_context and each.rate]
    return streams[-1] if streams else None


class Tensors:
    """Images with a rate and sound, with the interface of `FileSource`."""

    def __init__(
        self,
        shape: Sequence[int],
        read: Callable[[list[int]], Tensor],
        fps: Fraction,
        audio: Sound | None = None,
    ) -> None:
        """`shape` is that of an IMAGE of all; `read` gives those of some numbers."""
        if len(shape) != 4 or not all(shape) or shape[3] not in (3, 4):
            raise ValueError(f"its images are {list(shape)}; expected [N, H, W, 3 or 4]")
        self.count, self.size = shape[0], (shape[1], shape[2])
        self.read, self._audio, self.fps = read, audio, fps

    def pieces(self, fit: Fit) -> Iterator[Tensor]:
        """Yield `[1, C, t, H, W]` in the form of `fit`, floats in [-1, 1]."""
        return (images.movedim(-1, 0).unsqueeze(0) * 2 - 1 for images in self.images(fit))

    def images(self, fit: Fit) -> Iterator[Tensor]:
        """Yield the same as IMAGEs, a few frames each."""
        height, width = (side - side % fit.multiple for side in fit.size or self.size)
        if not height or not width:
            wanted = f", requested as {fit.size[1]}x{fit.size[0]}" if fit.size else ""
            raise ValueError(
                f"it is {self.size[1]}x{self.size[0]}{wanted}; "
                f"expected at least {fit.multiple}x{fit.multiple}"
            )
        last, step = self.count - 1, self.fps / (fit.fps or self.fps)
        # The frame nearest in time, the earlier of two, as for a file.
        nearest = (math.ceil(index * step - Fraction(1, 2)) for index in range(self.estimate(fit)))
        shown = [min(number, last) for number in nearest]
        for at in range(0, len(shown), _FRAMES):
            frames = self.read(shown[at : at + _FRAMES]).movedim(-1, 1).float()
            if fit.size is not None and fit.size != self.size:
                method = "area" if fit.size[0] < self.size[0] else "lanczos"
                frames = comfy.utils.common_upscale(frames, *fit.size[::-1], method, "center")
            top, left = (frames.shape[2] - height) // 2, (frames.shape[3] - width) // 2
            yield frames[:, :, top : top + height, left : left + width].movedim(1, -1)

    def estimate(self, fit: Fit) -> int:
        """Return the number of frames in the form of `fit`."""
        count = max(1, math.ceil(self.count * (fit.fps or self.fps) / self.fps))
        return count if fit.limit is None else min(count, fit.limit)

    def sound(self, fit: Fit) -> Sound | None:
        """Return the AUDIO of the frames in the form of `fit`; None: there is none."""
        seconds = fit.seconds(self.fps)
        if self._audio is None or seconds is None:
            return self._audio
        length = round(seconds * int(self._audio["sample_rate"]))
        return self._audio | {"waveform": self._audio["waveform"][..., :length]}

    def track(self, fit: Fit) -> media.Audio | None:
        """Return the sound of the frames for a file; None: there is none."""
        sound = self.sound(fit)
        return sound and media.Audio(sound["waveform"][0], int(sound["sample_rate"]))

    def tags(self) -> dict[str, str]:
        """Return no tags: there is no file."""
        return {}


Source = FileSource | Tensors
