"""One video file from several that were encoded with the same settings, without another encode.

Packets are copied, so the picture is that of the parts, and memory holds one packet. Each part has
to begin with a key frame, as every file does, and its frames are those of one rate: their times
are counted, because some containers round them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from av.container import InputContainer, OutputContainer
from av.packet import Packet

from .atomic_file import whole_file
from .audio import Sound, SoundTrack
from .codecs import codec_named, container_of, sound_encoder
from .segments import copied_stream
from .timestamps import checked_rate
from .video_writer import errors_name, new_container


def join_parts(
    parts: Sequence[Path],
    path: str | os.PathLike[str],
    fps: Fraction | float,
    *,
    codec: str,
    audio: Sound | None = None,
    metadata: Mapping[str, str] | None = None,
    frames: int | None = None,
    passed: Callable[[int], object] = lambda count: None,
) -> None:
    """Write the frames of `parts`, files of `VideoWriter` with the same settings, to one file.

    Args:
        parts: The files in order of time, without sound.
        path: The new file, which appears when it is complete, in place of an older one.
        fps: Frames per second of the parts.
        codec: Their codec, one of `available_codecs`, but none of images.
        audio: The sound, which is encoded and cut to the length of the video.
        metadata: Tags of the new file.
        frames: The number of their frames; None: it is not checked.
        passed: Called for each frame with 1; what it raises ends the work.

    Raises:
        ValueError: There are no parts, their encoders had other settings, or frames are missing.
    """
    target, kind, rate = Path(path), codec_named(codec), checked_rate(fps)
    if not parts:
        raise ValueError(f"there are no parts of {target}; expected at least one")
    if audio is not None and next(audio.blocks(), None) is None:
        audio = None  # some players stop at an empty track
    with whole_file(target, overwrite=True) as draft, errors_name(target):
        form = container_of(kind, target)
        with new_container(draft.part, form, metadata or {}, exact=True) as output:
            encoder = sound_encoder(kind, target) if audio else ""
            found = _Joined(output, rate, audio, encoder).add(parts, passed)
        if frames not in (None, found):
            raise ValueError(f"the parts of {target} have {found} frames; expected {frames}")


class _Joined:
    """The streams of the new file."""

    def __init__(
        self, output: OutputContainer, rate: Fraction, audio: Sound | None, encoder: str
    ) -> None:
        self._output, self._rate, self._audio, self._encoder = output, rate, audio, encoder
        self._stream: Any = None
        self._sound: SoundTrack | None = None
        self._frames = 0

    def add(self, parts: Sequence[Path], passed: Callable[[int], object]) -> int:
        """Copy all parts, and the sound along with them; return the number of frames."""
        delay, settings = self._delay(parts), b""  # those of the decoder are in the file once
        for part in parts:
            with av.open(f"file:{part}") as file:
                own: Any = file.streams.video[0]
                found = bytes(own.codec_context.extradata or b"")
                if self._stream is None:
                    settings = found
                    self._begin(own)
                elif found != settings:
                    raise ValueError(f"{part} has other settings of the encoder than {parts[0]}")
                self._copy(_packets(file, self._rate), delay, passed)
        if self._sound:
            self._sound.close()
        return self._frames

    def _begin(self, like: Any) -> None:  # noqa: ANN401, a stream of PyAV
        self._stream = stream = copied_stream(self._output, like, self._rate)
        stream.codec_context.codec_tag = like.codec_context.codec_tag
        if self._audio is not None:
            self._sound = SoundTrack(self._audio, self._output, self._encoder)

    def _delay(self, parts: Sequence[Path]) -> int:
        """Return how many frames decoding is ahead of showing, in the part where it is most."""
        found = 0
        for part in parts:
            with av.open(f"file:{part}") as file:
                if not file.streams.video[0].codec_context.has_b_frames:
                    return 0
                shown = (number for _, number in _packets(file, self._rate))
                found = max(found, *(at - number for at, number in enumerate(shown)))
        return found

    def _copy(
        self,
        packets: Iterator[tuple[Packet, int]],
        delay: int,
        passed: Callable[[int], object],
    ) -> None:
        """Copy the packets of a part behind those before it."""
        offset = self._frames
        for packet, number in packets:
            packet.pts, packet.dts = offset + number, self._frames - delay
            packet.time_base, packet.duration = 1 / self._rate, 1
            packet.stream = self._stream
            self._output.mux(packet)
            self._frames += 1
            if self._sound:
                self._sound.write_until(self._frames / self._rate)
            passed(1)


def _packets(file: InputContainer, rate: Fraction) -> Iterator[tuple[Packet, int]]:
    """Yield the packets of a part in the order of decoding, and the numbers of their frames."""
    for packet in file.demux(file.streams.video[0]):
        if packet.size and packet.pts is not None:
            yield packet, round(packet.pts * packet.time_base * rate)
