"""The process that encodes segments of a video for `segments.py`; it imports PyAV alone.

It reads pickles from stdin: per segment its patience in seconds and its settings, the planes of
each frame, and None. It writes pickles to stdout: per segment a whole MP4 file, or the code and the
text of an error. It ends with its caller, and with `HUNG` if a step takes longer than its patience.
"""

import faulthandler
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

import av
from av.container import OutputContainer
from av.packet import Packet

# The code with which `faulthandler` ends a process.
HUNG = 1


class Settings(NamedTuple):
    """Settings of an encoder."""

    encoder: str  # FFmpeg's name
    options: dict[str, str]
    rate: Fraction  # frames per second
    size: tuple[int, int]  # width and height
    pixels: str  # FFmpeg's name of the pixel format
    context: dict[str, Any]  # other attributes of PyAV's codec context


def add_stream(container: OutputContainer, settings: Settings) -> Any:  # noqa: ANN401
    """Add a stream for frames to a file, and open its encoder."""
    os.environ.setdefault("SVT_LOG", "1")  # SVT-AV1 logs its settings; 1: errors only
    stream: Any = container.add_stream(
        settings.encoder, rate=settings.rate, options=settings.options
    )
    stream.width, stream.height = settings.size
    stream.pix_fmt = settings.pixels
    # An image sequence has the encoder itself as its stream.
    context = getattr(stream, "codec_context", stream)
    for name, value in settings.context.items():
        setattr(context, name, value)
    context.open()
    return stream


def encoded(settings: Settings, frames: Iterable[list[bytes]], patience: float = 0) -> bytes:
    """Encode frames, given by their planes, to an MP4 file.

    If a step of the encoder takes longer than `patience` in seconds, the process ends; 0: it waits.
    """
    file, taken, made = io.BytesIO(), 0, 0

    def step(work: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401
        if not patience:
            return work(*given)
        faulthandler.dump_traceback_later(patience, exit=True)
        try:
            return work(*given)
        finally:  # the caller may take its time
            faulthandler.cancel_dump_traceback_later()

    def encode(number: int, planes: list[bytes]) -> list[Packet]:
        frame = av.VideoFrame(*settings.size, settings.pixels)
        for plane, data in zip(frame.planes, planes, strict=True):
            plane.update(data)
        frame.pts, frame.time_base = number, 1 / settings.rate
        return stream.encode(frame)

    with av.open(file, "w", format="mp4") as container:
        stream = step(add_stream, container, settings)
        for taken, planes in enumerate(frames, 1):
            packets = step(encode, taken - 1, planes)
            made += len(packets)
            container.mux(packets)
        last = stream.codec_context.encode_lazy(None)
        while (packet := step(next, last, None)) is not None:
            made += 1
            packet.stream = stream
            container.mux(packet)
    if made != taken:
        raise RuntimeError(f"{made} of {taken} frames were encoded")
    return file.getvalue()


def main() -> None:
    """Encode segments until the caller ends, or one fails."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else writes to that pipe
    reply: Any = b""
    with suppress(EOFError, KeyboardInterrupt, OSError, pickle.UnpicklingError):
        while isinstance(reply, bytes):
            patience, *settings = pickle.load(sys.stdin.buffer)
            frames = iter(lambda: pickle.load(sys.stdin.buffer), None)
            try:
                reply = encoded(Settings(*settings), frames, patience)
            except Exception as error:
                text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                reply = getattr(error, "errno", None) or 0, text
            pickle.dump(reply, output)
            output.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
