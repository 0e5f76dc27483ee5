"""Video files in through PyAV, frame by frame, so that memory does not grow with length."""

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import av
import torch
from av.container import InputContainer
from av.video.stream import VideoStream
from torch import Tensor

from .av_input import (
    AREA,
    BICUBIC,
    FAULTS,
    LANCZOS,
    MISSING_SECONDS,
    MISSING_SHARE,
    Upright,
    announced_seconds,
    decoded,
    faults_name,
    opened,
    quarter_turns,
)
from .cadence import PacketTimes, cadence, indexed_times, is_near
from .timestamps import (
    AHEAD,
    LEEWAY,
    SLACK,
    TimedFrame,
    at_rate,
    between,
    checked_rate,
    frames_within,
    in_step,
    timed,
)

LOG = logging.getLogger(__name__)
# Where a file gives neither a frame rate nor a duration.
FALLBACK_FPS = Fraction(25)


@dataclass(frozen=True)
class VideoFile:
    """A video file that can be read any number of times.

    Attributes:
        path: Where the file lies; of an open file, what errors call it.
        height: Height of the picture in pixels, upright.
        width: Width of the picture in pixels, upright.
        fps: Frames per second that it is read at; see `pieces`.
        estimated_frames: The count of frames at that rate, by what the file announces; None where
            it announces nothing.
        origin: When the first frame is, by the file's own clock, in seconds.
        file: The file itself where it was handed over open, which is one thread's at a time.
        varies: The times of its frames are those of no constant rate; None: they have no times, and
            one simply follows the other.
        announced_fps: Frames per second by what the file announces, which may be wrong; None: it
            announces nothing.
        seconds: How long it lasts, as the file announces; 0 where it does not.
    """

    path: Path
    height: int
    width: int
    fps: Fraction
    estimated_frames: int | None
    origin: Fraction = Fraction(0)
    file: BinaryIO | None = None
    varies: bool | None = None
    announced_fps: Fraction | None = None
    seconds: float = 0.0

    def frames(self, start: float = 0.0, duration: float | None = None) -> Iterator[Tensor]:
        """Decode the file, or a stretch of it.

        Args:
            start: Seconds after the first frame of the file; the first frame given is the first
                that is shown then or later. What lies before is passed over without decoding it,
                from its last key frame on.
            duration: Seconds; frames from `start + duration` on are left out. None: all.

        Returns:
            Frames, `[H, W, 3]` uint8 RGB, upright. They begin where they should to within 0.6 ms,
            because Matroska rounds times to 1 ms.

        Raises:
            ValueError: The file is broken or ends too early, or has nothing at `start`.
        """
        begin, seconds = self._stretch(start, duration)
        upright = Upright(self.path, self.height, self.width)
        return (upright(item.frame) for item in self._timed(begin, seconds))

    def pieces(
        self,
        *,
        multiple: int = 1,
        frames: int = 4,
        fps: Fraction | None = None,
        size: tuple[int, int] | None = None,
        start: float = 0.0,
        duration: float | None = None,
        limit: int | None = None,
    ) -> Iterator[Tensor]:
        """Decode the file in runs of frames, such as `VideoVAE.encode_stream` takes.

        They are at a constant rate. Of a file that has one, they are its frames; of another, those
        that keep its timing: some are repeated or left out, and the log says so.

        Args:
            multiple: Height and width are cropped about the centre to multiples of this.
            frames: Frames in a piece; the last may have fewer.
            fps: Frames per second: the frame at `n / fps` after the first is the one nearest in
                time, so some are repeated or left out, and none is blended. None: `self.fps`.
            size: Height and width: the picture is resized to cover them, which keeps its aspect,
                and cropped about the centre. None: those of the file.
            start: As in `frames`.
            duration: As in `frames`.
            limit: Most frames in all. None: no limit.

        Returns:
            Pieces, `[1, 3, t, H, W]` uint8.

        Raises:
            ValueError: An argument is out of range, the picture is smaller than `multiple`, the
                file is broken, or it has nothing at `start`.
        """
        if frames < 1 or (limit is not None and limit < 1):
            raise ValueError(f"frames are {frames}, limited to {limit}; expected at least 1")
        begin, seconds = self._stretch(start, duration)
        rate = None if fps is None else checked_rate(fps)
        convert = self._fitted(*self.cropped_size(multiple, size), size)

        def pictures() -> Iterator[Tensor]:
            for frame, count in self._at(rate, begin, seconds):
                yield from itertools.repeat(convert(frame), count)

        return _runs(itertools.islice(pictures(), limit), frames)

    def _at(
        self, rate: Fraction | None, begin: Fraction, seconds: Fraction | None
    ) -> Iterator[tuple[av.VideoFrame, int]]:
        """The frames of a stretch at a constant rate, and how often each is shown."""
        end = None if seconds is None else begin + seconds
        if rate is None and self.varies is None:
            yield from ((item.frame, 1) for item in self._timed(begin, seconds))
            return
        found = self._timed(begin, seconds, beyond=True)
        if rate is not None:
            yield from at_rate(found, rate, begin, end)
            return
        noted = False
        announced = self.announced_fps or self.fps
        for frame, count in in_step(found, self.fps, begin, end, ends=self.varies is True):
            if not noted and (self.varies or count > 1 or not is_near(announced, self.fps)):
                noted = True
                LOG.info("Fast Video VAE: %s has a varying frame rate, or another than it "
                         "announces; it is read at %.5g frames per second, which keeps its timing; "
                         "fps sets another rate", self.path.name, self.fps)  # fmt: skip
            yield frame, count

    def cropped_size(self, multiple: int, size: tuple[int, int] | None = None) -> tuple[int, int]:
        """Height and width of the file, or of a wanted `size`, cut down to multiples of `multiple`.

        Raises:
            ValueError: Nothing would be left.
        """
        full = size or (self.height, self.width)
        height, width = (side - side % multiple for side in full)
        if height < 1 or width < 1:
            wanted = f" and the wanted size is {size[1]}x{size[0]}" if size else ""
            raise ValueError(
                f"{self.path} is {self.width}x{self.height}{wanted}; "
                f"expected at least {multiple}x{multiple}"
            )
        return height, width

    def estimate(
        self,
        *,
        fps: Fraction | None = None,
        start: float = 0.0,
        duration: float | None = None,
        limit: int | None = None,
    ) -> int | None:
        """How many frames `pieces` gives, by what the file announces; None: it does not tell."""
        begin, seconds = self._stretch(start, duration)
        count = self.estimated_frames
        if count is None:
            return None
        rest = count / self.fps - begin
        if fps is not None or start or duration is not None:
            rest = rest if seconds is None else min(rest, seconds)
            count = frames_within(rest, fps or self.fps)
        return count if limit is None else min(count, limit)

    def _stretch(self, start: float, duration: float | None) -> tuple[Fraction, Fraction | None]:
        """Start and length in exact seconds, looked over before any work."""
        if not 0 <= start < math.inf:
            raise ValueError(f"start is {start} s; expected 0 or more")
        if duration is not None and not 0 < duration < math.inf:
            raise ValueError(f"duration is {duration} s; expected more than 0")
        if start and self.estimated_frames is not None:
            length = self.estimated_frames / self.fps
            # Containers round and rates vary; what is near the end is found out there.
            if start > length + max(MISSING_SECONDS, MISSING_SHARE * float(length)):
                raise ValueError(f"{self.path} lasts {float(length):.2f} s; start is {start} s")
        return Fraction(start), None if duration is None else Fraction(duration)

    def _fitted(
        self, height: int, width: int, size: tuple[int, int] | None
    ) -> Callable[[av.VideoFrame], Tensor]:
        """What turns a frame into a picture `[height, width, 3]`, out of the middle of `size`."""
        full = (self.height, self.width) if size is None else self._covering(*size)
        scaler = BICUBIC
        if full != (self.height, self.width):
            scaler = AREA if full[0] < self.height else LANCZOS
        upright = Upright(self.path, *full, scaler)
        top, left = (full[0] - height) // 2, (full[1] - width) // 2
        return lambda frame: upright(frame)[top : top + height, left : left + width]

    def _covering(self, height: int, width: int) -> tuple[int, int]:
        """The least size of the video's aspect that covers another."""
        if width * self.height > height * self.width:
            return max(height, round(Fraction(self.height * width, self.width))), width
        return height, max(width, round(Fraction(self.width * height, self.height)))

    def _timed(
        self, start: Fraction, seconds: Fraction | None, *, beyond: bool = False
    ) -> Iterator[TimedFrame]:
        """The frames of a stretch, one at least; `beyond`: those after it as well."""
        end = None if seconds is None else start + seconds
        found = between(self._from(start), start, None, (1 + LEEWAY) / self.fps)
        first = next(found, None)
        if first is None or (end is not None and first.time >= end - SLACK):
            until = "" if end is None else f" and before {float(end):g} s"
            raise ValueError(f"{self.path} has no frame at {float(start):g} s or later{until}")
        frames = itertools.chain([first], found)
        yield from frames if beyond else between(frames, first.time, end)

    def _from(self, start: Fraction) -> Iterator[TimedFrame]:
        """Frames that begin at `start` or before it, from the last key frame where it is found."""
        if start:
            with opened(self.path, self.file) as (container, stream):
                found = self._sought(container, stream, start)
                if found is not None:
                    yield from found
                    return
        with opened(self.path, self.file) as (container, stream):
            frames = decoded(self.path, container.demux(stream), stream)
            yield from self._with_times(frames)

    def _sought(
        self, container: InputContainer, stream: VideoStream, start: Fraction
    ) -> Iterator[TimedFrame] | None:
        """Frames from a key frame before `start`; None where the file does not tell its place."""
        if not stream.time_base:
            return None
        try:
            container.seek(int((start + self.origin) / stream.time_base), stream=stream)
            frames = decoded(self.path, container.demux(stream), stream)
            first = next(frames, None)
            if first is None or first.pts is None:
                return None
            items = self._with_times(itertools.chain([first], frames))
            before: list[TimedFrame] = []
            item = next(items)
            if item.time > start + SLACK:
                return None
            # Damage here may be of the seeking alone: a picture that is refreshed bit by bit.
            while item.time < start - SLACK:
                before = [item]
                item = next(items)
        except (StopIteration, *FAULTS):
            return None
        return itertools.chain(before, [item], items)

    def _with_times(self, frames: Iterable[av.VideoFrame]) -> Iterator[TimedFrame]:
        # No pause is longer than the whole, but what a container announces may be of other streams.
        pause = Fraction(self.seconds) if self.seconds else AHEAD
        return timed(frames, self.origin, self.fps, ahead=min(pause, AHEAD))


def read_video(source: str | os.PathLike[str] | BinaryIO) -> VideoFile:
    """Look at a video file; its first frame is decoded and the rest is not.

    Args:
        source: A video in any format that FFmpeg reads, by its path or as a file that is open for
            reading bytes and can seek, such as `io.BytesIO`. A picture is a video of one frame.

    Returns:
        The video, to be read with `frames` or `pieces`.

    Raises:
        OSError: There is no such file, or it may not be read.
        ValueError: It is no video: empty, broken, truncated, or without pictures.
    """
    if isinstance(source, (str, os.PathLike)):
        path, file = Path(source), None
    else:
        path, file = Path(str(getattr(source, "name", "the video"))), source
    with (
        faults_name(path, "is not a video that can be read"),
        opened(path, file) as (container, stream),
    ):
        # Rotation lies on the frame, not on the stream, and headers may be wrong about the size.
        sample = PacketTimes(container.demux(stream))
        first = next(decoded(path, iter(sample), stream), None)
        if first is None:
            raise ValueError(f"{path} holds no frame that can be decoded; expected a video")
        height, width = first.height, first.width
        if quarter_turns(first) % 2:
            height, width = width, height
        times = sample.times()
        # PyAV 19 has numbers of its own here, of which one that is not known is false.
        announced = [Fraction(rate) for rate in (stream.average_rate, stream.guessed_rate) if rate]
        fps, constant = cadence(times and (indexed_times(stream) or times), announced)
        fps = fps or FALLBACK_FPS
        varies = not constant if len(times) > 1 else None
        whole = (container.duration or 0) / av.time_base
        seconds = announced_seconds(stream) or whole
        count = stream.frames if constant else None
        if not count:
            # Where the stream itself has no duration, time counts from the start of the file.
            late = 0.0 if stream.duration else first.time or 0.0
            count = max(0, round((seconds - late) * fps)) or None
        origin = Fraction(0)
        if first.pts is not None and first.time_base:
            origin = first.pts * first.time_base
    rate, most = next(iter(announced), None), max(seconds, whole)
    return VideoFile(path, height, width, fps, count, origin, file, varies, rate, most)


def _runs(pictures: Iterator[Tensor], frames: int) -> Iterator[Tensor]:
    """Pictures `[H, W, 3]` in pieces `[1, 3, t, H, W]`."""
    while held := list(itertools.islice(pictures, frames)):
        yield torch.stack(held).permute(3, 0, 1, 2).unsqueeze(0)
