"""Writing of a sequence of images: a folder with a file per frame, encoded with PyAV.

It has the methods of PyAV's output container that `VideoWriter` uses.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
from av.packet import Packet

# The name of the image of a frame; FFmpeg and editors read it as frame_%05d.
NAME = "frame_{:05}{}"
# Images that are encoded at a time; each is held in memory.
THREADS = min(4, os.cpu_count() or 1)
# Bytes of the signature and the first chunk of a PNG file.
_PNG_START = 33


class ImageFolder:
    """A folder of `.png` or `.exr` images; the first PNG has the metadata."""

    def __init__(self, folder: Path, suffix: str, metadata: Mapping[str, str]) -> None:
        self._folder, self._suffix, self._metadata = folder, suffix, metadata
        self._written = 0

    def add_stream(
        self, encoder: str, rate: Fraction, options: Mapping[str, str]
    ) -> av.VideoCodecContext:
        """Return the encoder of the images, which is not open yet."""
        context = cast(av.VideoCodecContext, av.CodecContext.create(encoder, "w"))
        context.time_base, context.framerate, context.options = 1 / rate, rate, dict(options)
        context.thread_type, context.thread_count = "FRAME", THREADS
        return context

    def mux(self, packets: Iterable[Packet]) -> None:
        """Write images, one per packet, in order."""
        for packet in packets:
            data = bytes(packet)
            if not self._written and self._suffix == ".png":
                texts = b"".join(map(_text, self._metadata.items()))
                data = data[:_PNG_START] + texts + data[_PNG_START:]
            path = self._folder / NAME.format(self._written, self._suffix)
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # some disks report only here that they are full
            self._written += 1

    def close(self) -> None:
        """Do nothing: every image is complete when it is written."""


def _text(item: tuple[str, str]) -> bytes:
    """Return a text chunk, as in the PNG specification, section 11.3.3."""
    # ComfyUI reads tEXt, which is Latin-1; JSON escapes all other characters.
    text = "".join(c if "\0" < c < "\u0100" else json.dumps(c)[1:-1] for c in item[1])
    name = item[0].replace("\0", " ").encode("latin-1", "replace")[:79] or b"Comment"
    data = b"tEXt" + name + b"\0" + text.encode("latin-1")
    return (len(data) - 4).to_bytes(4, "big") + data + zlib.crc32(data).to_bytes(4, "big")
