"""Reading of video files with PyAV, frame by frame, in memory that is independent of the length."""

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import av
import torch
from av.video.stream import VideoStream
from torch import Tensor

from .av_input import (
    FAULTS,
    MISSING_SECONDS,
    MISSING_SHARE,
    MOST_PIXELS,
    announced_seconds,
    decoded,
    faults_name,
    opened,
)
from .cadence import cadence, is_near, sampled
from .timestamps import (
    AHEAD,
    LEEWAY,
    SLACK,
    TimedFrame,
    checked_rate,
    frames_within,
    paced,
    since,
    timed,
)
from .upright import AREA, BICUBIC, LANCZOS, bit_depth, quarter_turns, upright

LOG = logging.getLogger(__name__)
# Pixels up to this many times as wide as high, or as high as wide, occur in files.
WIDEST_PIXEL = 10


@dataclass(frozen=True)
class VideoFile:
    """A video file that can be read any number of times."""

    path: Path  # of an open file, its name in errors
    height: int  # upright, in square pixels, as the width
    width: int
    fps: Fraction  # of `pieces`
    estimated_frames: int | None  # at that rate by the declared duration; None: unknown
    origin: Fraction = Fraction(0)  # time of the first frame by the clock of the file
    file: BinaryIO | None = None  # only one thread may read it at a time
    varies: bool | None = None  # the rate is not constant; None: the frames have no times
    announced_fps: Fraction | None = None  # may be wrong
    seconds: float = 0.0  # declared; 0: not declared
    bit_depth: int = 8  # floats count as 16
    stored_size: tuple[int, int] | None = None  # upright, in pixels of the file if not square

    def frames(
        self,
        start: float = 0.0,
        duration: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[Tensor]:
        """Decode a range of the file in seconds, exact to 0.6 ms: Matroska rounds times to 1 ms.

        Frames are `[H, W, 3]` RGB, upright, uint8 or, of more than 8 bits, uint16 unless `dtype` is
        uint8.
        """
        begin, end = self._range(start, duration)
        convert = self._converter(1, None, dtype)
        return (convert(item.frame) for item in _until(end, self._timed(begin, end)))

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
        dtype: torch.dtype | None = None,
    ) -> Iterator[Tensor]:
        """Decode the file in pieces, as `VideoVAE.encode_stream` takes them.

        The rate is constant. A file with a varying rate keeps its timing: frames are repeated or
        dropped, which is logged. With `fps` the frame nearest to `n / fps` is used, never a blend.
        With `size` the picture is resized to cover it. Both are cropped about the centre.
        """
        if frames < 1 or (limit is not None and limit < 1):
            raise ValueError(f"frames are {frames}, limited to {limit}; expected at least 1")
        begin, end = self._range(start, duration)
        rate = None if fps is None else checked_rate(fps)
        convert = self._converter(multiple, size, dtype)

        def found() -> Iterator[Tensor]:
            shown = self._paced(rate, begin, end)
            every = (each for frame, n in shown for each in itertools.repeat(convert(frame), n))
            pictures = itertools.islice(every, limit)
            while held := list(itertools.islice(pictures, frames)):
                yield torch.stack(held).permute(3, 0, 1, 2).unsqueeze(0)

        return found()

    def _paced(
        self, rate: Fraction | None, begin: Fraction, end: Fraction | None
    ) -> Iterator[tuple[av.VideoFrame, int]]:
        """Yield the frames of a range at a constant rate, and how often each is shown."""
        found = self._timed(begin, end)
        if rate is not None:
            yield from paced(found, rate, begin, end)
            return
        if self.varies is None:
            yield from ((item.frame, 1) for item in _until(end, found))
            return
        silent = not self.varies and is_near(self.announced_fps or self.fps, self.fps)
        noted = False
        for frame, count in paced(found, self.fps, begin, end, steady=True, lasts=self.varies):
            if not noted and (count > 1 or not silent):
                noted = True
                LOG.info("Fast Video VAE: %s has a varying frame rate, or another than it "
                         "declares; it is read at %.5g frames per second, which keeps its timing; "
                         "fps sets another rate", self.path.name, self.fps)  # fmt: skip
            yield frame, count

    def cropped_size(self, multiple: int, size: tuple[int, int] | None = None) -> tuple[int, int]:
        """Return a size (None: that of the file) cropped to multiples of `multiple` pixels."""
        full = size or (self.height, self.width)
        height, width = (side - side % multiple for side in full)
        if height < 1 or width < 1:
            wanted = f", requested as {size[1]}x{size[0]}" if size else ""
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
        """Estimate how many frames `pieces` gives by the declared duration; None: unknown."""
        begin, end = self._range(start, duration)
        count = self.estimated_frames
        if count is None:
            return None
        if fps is not None or start or duration is not None:
            length = count / self.fps
            rest = (length if end is None else min(length, end)) - begin
            count = frames_within(rest, fps or self.fps)
        return count if limit is None else min(count, limit)

    def _range(self, start: float, duration: float | None) -> tuple[Fraction, Fraction | None]:
        """Return start and end as exact seconds, checked before any work."""
        if not 0 <= start < math.inf:
            raise ValueError(f"start is {start} s; expected 0 or more")
        if duration is not None and not 0 < duration < math.inf:
            raise ValueError(f"duration is {duration} s; expected more than 0")
        if start and self.estimated_frames is not None:
            length = self.estimated_frames / self.fps
            # Containers round and rates vary; the exact end is found when it is read.
            if start > length + max(MISSING_SECONDS, MISSING_SHARE * float(length)):
                raise ValueError(f"{self.path} lasts {float(length):.2f} s; start is {start} s")
        return Fraction(start), None if duration is None else Fraction(start) + Fraction(duration)

    def _converter(
        self, multiple: int, size: tuple[int, int] | None, dtype: torch.dtype | None
    ) -> Callable[[av.VideoFrame], Tensor]:
        """Return the conversion of a frame to RGB that covers `size`, `[height, width, 3]`."""
        if dtype not in (None, torch.uint8):
            raise ValueError(f"dtype is {dtype}; expected torch.uint8, or None for all bits")
        height, width = self.cropped_size(multiple, size)
        own = full = self.height, self.width
        if size is not None:
            # The smallest size with the aspect ratio of the video that covers the one asked for.
            scale = max(Fraction(side, of) for side, of in zip(size, own, strict=True))
            full = round(own[0] * scale), round(own[1] * scale)
        stored = self.stored_size or own
        # The mean over areas does not interpolate a side that grows, as one of pixels that are not
        # square can.
        shrinks = full[0] < own[0] and full[0] <= stored[0] and full[1] <= stored[1]
        scaler = BICUBIC if full == stored else AREA if shrinks else LANCZOS
        convert = upright(self.path, full, scaler, deep=dtype is None and self.bit_depth > 8)
        top, left = (full[0] - height) // 2, (full[1] - width) // 2
        return lambda frame: convert(frame)[top : top + height, left : left + width]

    def _timed(self, start: Fraction, end: Fraction | None) -> Iterator[TimedFrame]:
        """Yield the frames from `start` on, of which at least one is before `end`."""
        found = since(self._from(start, start > 0), start, (1 + LEEWAY) / self.fps)
        first = next(found, None)
        if first is None or (end is not None and first.time >= end - SLACK):
            until = "" if end is None else f" and before {float(end):g} s"
            raise ValueError(f"{self.path} has no frame at {float(start):g} s or later{until}")
        yield first
        yield from found

    def _from(self, start: Fraction, seeks: bool) -> Iterator[TimedFrame]:
        """Yield frames from `start` or earlier on; `seeks`: from a key frame, if it is found."""
        with opened(self.path, self.file) as (container, stream):
            frames = decoded(self.path, container.demux(stream), stream)
            # No pause is longer than the whole, but the declared duration may be that of other
            # streams.
            pause = min(Fraction(self.seconds) or AHEAD, AHEAD)
            items = timed(frames, self.origin, self.fps, ahead=pause)
            before: list[TimedFrame] = []
            found = True
            try:
                if seeks and stream.time_base:
                    container.seek(int((start + self.origin) / stream.time_base), stream=stream)
                    before = [next(items)]
                    found = before[0].frame.pts is not None and before[0].time <= start + SLACK
                # An error here may come from the seek alone, as in a stream with intra refresh.
                while found and before and before[-1].time < start - SLACK:
                    before = [before[-1], next(items)]
            except (StopIteration, *FAULTS):
                found = False
            if found:
                yield from itertools.chain(before, items)
                return
        yield from self._from(start, seeks=False)


def read_video(source: str | os.PathLike[str] | BinaryIO) -> VideoFile:
    """Open a video, by path or as an open file that can seek, and decode its first frame."""
    if isinstance(source, (str, os.PathLike)):
        path, file = Path(source), None
    else:
        path, file = Path(str(getattr(source, "name", "the video"))), source
    with (
        faults_name(path, "is not a video that can be read"),
        opened(path, file) as (container, stream),
    ):
        # Rotation is a property of the frame, not the stream, and a header may give a wrong size.
        packets = container.demux(stream)
        sample, times = sampled(stream, packets)
        first = next(decoded(path, itertools.chain(sample, packets), stream), None)
        if first is None:
            raise ValueError(f"{path} has no frame that can be decoded; expected a video")
        (height, width), stored = _sizes(path, stream, first)
        # PyAV 19 has its own number type here; an unknown rate is false.
        announced = [Fraction(rate) for rate in (stream.average_rate, stream.guessed_rate) if rate]
        fps, constant = cadence(times, announced)
        whole = (container.duration or 0) / av.time_base
        seconds = announced_seconds(stream) or whole
        count = stream.frames if constant else None
        if not count:
            # Without a duration of the stream, times count from the start of the file.
            late = 0.0 if stream.duration else first.time or 0.0
            count = max(0, round((seconds - late) * fps)) or None
    return VideoFile(
        path,
        height,
        width,
        fps,
        count,
        origin=first.pts * first.time_base if first.pts and first.time_base else Fraction(0),
        file=file,
        varies=not constant if len(times) > 1 else None,
        announced_fps=next(iter(announced), None),
        seconds=max(seconds, whole),
        bit_depth=bit_depth(first),
        stored_size=stored,
    )


def _sizes(
    path: Path, stream: VideoStream, first: av.VideoFrame
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return height and width, upright, in square pixels and in those of the file."""
    ratio = Fraction(stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio or 1)
    if not Fraction(1, WIDEST_PIXEL) <= ratio <= WIDEST_PIXEL:
        LOG.debug("Fast Video VAE: a pixel aspect ratio of %s is ignored", ratio)
        ratio = Fraction(1)
    height, width = first.height, first.width
    shown = max(1, round(width * ratio))
    if height * shown > MOST_PIXELS:
        raise ValueError(
            f"{path} is {shown}x{height} in square pixels; expected at most {MOST_PIXELS:,}"
        )
    if ratio != 1:
        LOG.info("Fast Video VAE: %s has pixels of %d:%d; its width is scaled from %d to %d",
                 path.name, *ratio.as_integer_ratio(), width, shown)  # fmt: skip
    if quarter_turns(first) % 2:
        return (shown, height), (width, height)
    return (height, shown), (height, width)


def _until(end: Fraction | None, frames: Iterator[TimedFrame]) -> Iterator[TimedFrame]:
    """Yield the frames before `end`; None: all."""
    return itertools.takewhile(lambda item: end is None or item.time < end - SLACK, frames)
