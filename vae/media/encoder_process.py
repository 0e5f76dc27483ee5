"""The process that encodes segments of a video for `segments.py`; it imports PyAV alone.

It reads pickles from stdin: per segment its settings, the planes of each frame, and None. It writes
pickles to stdout: None for each frame taken and each packet made, then the segment as a whole MP4
file, or the code and the text of an error. It ends with its caller, even if the encoder hangs.
"""

import io
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from queue import SimpleQueue
from typing import Any, NamedTuple

import av
from av.container import OutputContainer


class Settings(NamedTuple):
    """Settings of an encoder."""

    encoder: str  # FFmpeg's name
    options: dict[str, str]
    rate: Fraction  # frames per second
    size: tuple[int, int]  # width and height
    pixels: str  # FFmpeg's name of the pixel format
    context: dict[str, Any]  # other attributes of PyAV's codec context


def add_stream(container: OutputContainer, settings: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Add a stream for frames to a file, and open its encoder."""
    os.environ.setdefault("SVT_LOG", "1")  # SVT-AV1 logs its settings; 1: errors only
    encoder, options, rate, (width, height), pixels, more = settings
    stream: Any = container.add_stream(encoder, rate=rate, options=options)
    stream.width, stream.height, stream.pix_fmt = width, height, pixels
    # An image sequence has the encoder itself as its stream.
    context = getattr(stream, "codec_context", stream)
    for name, value in more.items():
        setattr(context, name, value)
    context.open()
    return stream


def encoded(
    settings: tuple[Any, ...], receive: Callable[[], Any], report: Callable[[], None]
) -> bytes:
    """Encode frames from `receive`, until it returns None, to a segment that needs no other."""
    file = io.BytesIO()
    _, _, rate, (width, height), pixels, _ = settings
    with av.open(file, "w", format="mp4") as container:
        stream = add_stream(container, settings)
        for index, planes in enumerate(iter(receive, None)):
            frame = av.VideoFrame(width, height, pixels)
            for plane, data in zip(frame.planes, planes, strict=True):
                plane.update(data)
            frame.pts, frame.time_base = index, 1 / rate
            container.mux(stream.encode(frame))
            report()
        for packet in stream.codec_context.encode_lazy(None):
            packet.stream = stream
            container.mux(packet)
            report()
    return file.getvalue()


def main() -> None:
    """Encode segments until the caller ends."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else writes to that pipe
    requests: SimpleQueue[Any] = SimpleQueue()

    def reply(answer: bytes | tuple[int, str] | None = None) -> None:
        pickle.dump(answer, output)
        output.flush()

    def work() -> None:
        while True:
            try:
                reply(encoded(requests.get(), requests.get, reply))
            except Exception as error:
                text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                reply((getattr(error, "errno", None) or 0, text))

    threading.Thread(target=work, daemon=True).start()
    with suppress(EOFError, KeyboardInterrupt, OSError, pickle.UnpicklingError):
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    os._exit(0)


if __name__ == "__main__":
    main()
