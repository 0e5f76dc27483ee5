"""Decoding of a video file with PyAV; every problem of a file becomes an error of one line."""

import io
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from ...kernels import line, shown

# BT.709 in ISO/IEC 23091-2, for matrix, primaries and transfer.
BT709 = 1
BT601 = 5
# Largest picture: 16384 x 8192 pixels. FFmpeg's own limit is twice that, and a header of a few
# bytes can claim it.
MOST_PIXELS = 2**27
# What PyAV raises for a damaged file in addition to FFmpeg's errors: IndexError for a stream that
# appears after the header (before PyAV 17), ValueError for a rotation that is not a number.
FAULTS = (FFmpegError, ArithmeticError, LookupError, ValueError)
# Characters of FFmpeg's message that an error repeats.
WORDS = 150
# A file counts as truncated when more than this is missing of its declared duration. Containers
# round, and some do not count the last frame.
MISSING_SECONDS = 0.5
MISSING_SHARE = 0.1


@contextmanager
def opened(
    path: Path, file: BinaryIO | None = None
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open the first video stream of a file."""
    if file is None:
        with path.open("rb") as found:  # raises an OSError that names the path
            size = os.fstat(found.fileno()).st_size
            if not stat.S_ISREG(os.fstat(found.fileno()).st_mode):
                raise ValueError(f"{path} is not a file; expected a video")
    else:
        # A video in memory can be read twice at once; its bytes are not copied.
        file = io.BytesIO(file.getvalue()) if type(file) is io.BytesIO else file
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
    if not size:
        raise ValueError(f"{path} is empty; expected a video")
    with ExitStack() as stack:
        with faults_name(path, "is not a video that FFmpeg can read, or it is truncated"):
            # "file:" keeps FFmpeg from reading a colon in the name as a protocol.
            container = open_media(f"file:{path}" if file is None else file)
            stack.enter_context(container)
            stream = _video_stream(path, container, size)
        yield container, stream


@contextmanager
def faults_name(path: Path, what: str) -> Iterator[None]:
    """Turn an error of PyAV in the block into one line about `path`."""
    try:
        yield
    except FAULTS as error:
        names = str(path), shown(path.name, 60)
        if type(error) is ValueError and any(name in str(error) for name in names):
            raise ValueError(line(str(path), str(error))) from error.__cause__
        raise ValueError(line(str(path), f"it {what} ({reason(error)})")) from error


def open_media(source: object) -> InputContainer:
    """Open `source`, a path or an object with `read` and `seek`, with tags in any encoding."""
    # Before PyAV 19, tags that are not UTF-8 are an error unless this option is given. From 19 on
    # the option is unknown and the bytes are kept. `av.open` has no signature to inspect.
    tolerant: dict[str, Any] = {"metadata_errors": "replace"}
    # No `options`: with them PyAV 16 crashes when a stream appears after the header.
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
    stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
    stream.thread_type = "AUTO"
    # mp4 lists the position of each frame, so a truncated file is found before any work. PyAV
    # before 17 has no index; there the truncation is found at the end.
    index = getattr(stream, "index_entries", ()) if stream.frames else ()
    end = max((entry.pos + entry.size for entry in index), default=0)
    if end > size:
        raise ValueError(f"{path} is truncated: it has {size} bytes; expected at least {end}")
    return stream


def decoded(path: Path, packets: Iterator[Packet], stream: VideoStream) -> Iterator[av.VideoFrame]:
    """Decode all frames of a stream; a lost frame is an error, as it would shift all others.

    Errors before the first frame are skipped, because a recording may start anywhere.
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
    # A stream may start late and count from there, so `end` may be larger. The last frame may be
    # shown as long as any other, which some files do not declare.
    if end and announced - end > max(longest, MISSING_SHARE * announced):
        raise ValueError(f"{path} is truncated: it ends at {end:.2f} s; expected {announced:.2f} s")


def announced_seconds(stream: VideoStream) -> float:
    """Return the duration of `stream` in seconds as the container declares it; 0 if it does not."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    # Matroska and WebM store it in a tag: 00:00:02.500000000
    parts = stream.metadata.get("DURATION", "").split(":")
    try:
        hours, minutes, seconds = (float(part) for part in parts)
    except ValueError:
        return 0.0
    return 3600 * hours + 60 * minutes + seconds


def reason(error: BaseException) -> str:
    """Return FFmpeg's message of `error` in one line."""
    text = " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
    return text if len(text) <= WORDS else f"{text[:WORDS]}..."
