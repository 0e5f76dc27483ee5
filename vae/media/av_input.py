"""Every frame of a video file through PyAV, or one line that says what is wrong with the file.

The colour tags of the file (matrix and range) are honoured as FFmpeg honours them, which takes
BT.601 where there are none. swscale is asked for accurate rounding and interpolated chroma: its
default is up to 2 levels off, always downwards, and this at most 1.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import av
import torch
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.stream import Disposition
from av.video.reformatter import ColorRange, VideoReformatter
from av.video.stream import VideoStream
from torch import Tensor

from ...kernels import line, shown

# swscale's bits as libswscale/swscale.h fixes them; not every PyAV names them all. First how it
# scales: chroma always, luma where the size changes.
BICUBIC, AREA, LANCZOS = 0x4, 0x20, 0x200
# Full chroma in and out of the conversion, and accurate rounding. Without the first the chroma of a
# pair of pixels is repeated, and the last makes the bytes the same on every CPU.
EXACT = 0x2000 | 0x4000 | 0x40000
# The number of BT.709 in ISO/IEC 23091-2 for matrix, primaries and transfer alike.
BT709 = 1
BT601 = 5
# The most pixels of a picture: 16384 x 8192. FFmpeg's own limit is twice that, and a header of a
# few bytes can announce it.
MOST_PIXELS = 2**27
LIMITS = {"max_pixels": str(MOST_PIXELS)}
# What PyAV raises over a file that is damaged, besides FFmpeg's own: a stream that comes later than
# the header is an IndexError before PyAV 17, a rotation that is no number a ValueError.
FAULTS = (FFmpegError, ArithmeticError, LookupError, ValueError)
# How much of FFmpeg's words an error repeats.
WORDS = 150
# How much of the announced duration may be missing before a file counts as truncated. Containers
# round, and some count the last frame and some do not.
MISSING_SECONDS = 0.5
MISSING_SHARE = 0.1


class _Window:
    """A file object with a place of its own: a video in memory can be read twice at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._place = 0

    def read(self, count: int = -1) -> bytes:
        self._file.seek(self._place)
        data = self._file.read(count)
        self._place += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset, whence = offset + self._place, os.SEEK_SET
        self._place = self._file.seek(offset, whence)
        return self._place

    def tell(self) -> int:
        return self._place


@contextmanager
def opened(
    path: Path, file: BinaryIO | None = None
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open the first stream of moving pictures; says what is wrong where there is none.

    Args:
        path: The file, or what errors call it.
        file: The file itself, where it is open; it is read from its beginning and stays open.

    Yields:
        The container and the stream.

    Raises:
        OSError: There is no such file, or it may not be read.
        ValueError: It is no video that can be read.
    """
    if file is None:
        with path.open("rb") as found:  # raises the OSError that names the path
            size = os.fstat(found.fileno()).st_size
            if not stat.S_ISREG(os.fstat(found.fileno()).st_mode):
                raise ValueError(f"{path} is not a file; expected a video")
    else:
        size = file.seek(0, os.SEEK_END)
    if not size:
        raise ValueError(f"{path} is empty; expected a video")
    with ExitStack() as stack:
        with faults_name(path, "is not a video that FFmpeg can read, or it is truncated"):
            # "file:" keeps FFmpeg from taking a colon in the name for a protocol.
            container = open_media(f"file:{path}" if file is None else _Window(file))
            stack.enter_context(container)
            stream = _video_stream(path, container, size)
        yield container, stream


@contextmanager
def faults_name(path: Path, what: str) -> Iterator[None]:
    """Make one line of whatever PyAV raises over a file; errors that name the file pass."""
    try:
        yield
    except FAULTS as error:
        names = str(path), shown(path.name, 60)
        if type(error) is ValueError and any(name in str(error) for name in names):
            raise ValueError(line(str(path), str(error))) from error.__cause__
        raise ValueError(line(str(path), f"it {what} ({reason(error)})")) from error


def open_media(source: object) -> InputContainer:
    """Open a path, or an object with `read` and `seek`, whatever the encoding of its tags."""
    # PyAV before 19 takes tags that are no UTF-8 for an error unless it is asked not to. From 19 on
    # it does not know the option and keeps their bytes. Its `open` has no signature to look at.
    tolerant: dict[str, Any] = {"metadata_errors": "replace"}
    # No `options`, however useful: PyAV 16 crashes with them where a stream comes after the header.
    try:
        return av.open(source, "r", **tolerant)
    except TypeError:
        return av.open(source, "r")


def _video_stream(path: Path, container: InputContainer, size: int) -> VideoStream:
    cover = Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        kinds = {"cover" if s.type == "video" else s.type for s in container.streams}
        found = ", ".join(sorted(kinds)) or "nothing"
        raise ValueError(f"{path} has no video stream, only {found}; expected a video")
    stream = streams[0]
    if stream.codec_context is None:
        raise ValueError(f"{path} is in a video format that this build of FFmpeg cannot decode")
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > MOST_PIXELS:
        raise ValueError(f"{path} is {width}x{height}; expected at most {MOST_PIXELS:,} pixels")
    stream.codec_context.options = LIMITS
    stream.thread_type = "AUTO"
    # mp4 says where each frame lies: a file that was cut off is known by it before any work.
    # PyAV before 17 does not show it; there the end is noticed when it comes.
    index = getattr(stream, "index_entries", ()) if stream.frames else ()
    end = max((entry.pos + entry.size for entry in index), default=0)
    if end > size:
        raise ValueError(f"{path} is truncated: it has {size} bytes; expected at least {end}")
    return stream


def decoded(path: Path, packets: Iterator[Packet], stream: VideoStream) -> Iterator[av.VideoFrame]:
    """Every frame of a stream's packets, or an error: one that was lost would shift all others.

    Only what comes before the first frame is passed over, because a recording may begin anywhere.
    """
    count, end, longest = 0, 0.0, MISSING_SECONDS
    while True:
        try:
            packet = next(packets, None)
            frames = [] if packet is None else packet.decode()
        except FAULTS as error:
            if not count:
                continue
            why = f"it is broken or truncated after frame {count} ({reason(error)})"
            raise ValueError(line(str(path), why)) from error
        if packet is None:
            break
        for frame in (frame for frame in frames if not frame.is_corrupt):
            count += 1
            if frame.pts is not None and frame.time_base:
                time = float(frame.pts * frame.time_base)
                longest = max(longest, time - end if count > 1 else 0.0)
                end = time + float((frame.duration or 0) * frame.time_base)
            yield frame
        if count and (packet.is_corrupt or any(frame.is_corrupt for frame in frames)):
            why = f"it is broken or truncated after frame {count}"
            raise ValueError(line(str(path), why))
    if stream.frames and count >= stream.frames:
        return
    announced = announced_seconds(stream)
    # A stream may begin late and count from there, so `end` may be the larger one.
    # The last frame may be shown for as long as another was, which some files do not say of it.
    if end and announced - end > max(longest, MISSING_SHARE * announced):
        raise ValueError(f"{path} is truncated: it ends at {end:.2f} s; expected {announced:.2f} s")


def announced_seconds(stream: VideoStream) -> float:
    """What the container says of this stream's length; 0 where it says nothing."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    # Matroska and WebM keep it in a tag: 00:00:02.500000000
    parts = stream.metadata.get("DURATION", "").split(":")
    try:
        hours, minutes, seconds = (float(part) for part in parts)
    except ValueError:
        return 0.0
    return 3600 * hours + 60 * minutes + seconds


class Upright:
    """Converts frames to RGB of one size, turned upright."""

    def __init__(self, path: Path, height: int, width: int, scaler: int = BICUBIC) -> None:
        """Settle the size, upright, and swscale's bit for resizing; one object serves a thread."""
        self._path = path
        self._size = (height, width)
        self._flags = scaler | EXACT
        self._reformatter = VideoReformatter()

    def __call__(self, frame: av.VideoFrame) -> Tensor:
        """Convert a frame to `[height, width, 3]` uint8.

        Raises:
            ValueError: FFmpeg cannot.
        """
        with faults_name(self._path, "has a frame that cannot be shown"):
            return self._converted(frame)

    def _converted(self, frame: av.VideoFrame) -> Tensor:
        turns = quarter_turns(frame)
        height, width = self._size[::-1] if turns % 2 else self._size
        # A stream may change its size on the way; as in FFmpeg, the first frame's size holds.
        rgb = self._reformatter.reformat(
            frame,
            width=width,
            height=height,
            format="rgb24",
            interpolation=self._flags,
            src_color_range=frame.color_range,
            dst_color_range=ColorRange.JPEG,
            # RGB has no matrix. But PyAV before 17 minds the frame's own only where the two differ.
            dst_colorspace=BT601 if frame.colorspace == BT709 else BT709,
        )
        picture = torch.from_numpy(rgb.to_ndarray())
        return torch.rot90(picture, turns) if turns else picture


def quarter_turns(frame: av.VideoFrame) -> int:
    """How often 90 degrees anticlockwise make the frame upright, as a phone's tag asks."""
    return round(frame.rotation / 90) % 4


def reason(error: BaseException) -> str:
    """FFmpeg's own words for an error, in a line."""
    text = " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
    return text if len(text) <= WORDS else f"{text[:WORDS]}..."
