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
    others: Iterator[Path] | None = None,
) -> Path:
    """Write the frames of `parts`, files of `VideoWriter` with the same settings, to one file.

    Args:
        parts: The files in order of time, without sound.
        path: The new file, which appears when it is complete.
        fps: Frames per second of the parts.
        codec: Their codec, one of `available_codecs`, but none of images.
        audio: The sound, which is encoded and cut to the length of the video.
        metadata: Tags of the new file.
        frames: The number of their frames; None: it is not checked.
        passed: Called for each frame with 1; what it raises ends the work.
        others: Names in place of `path` if it is taken; None: an older file is replaced.

    Returns:
        The name of the new file.

    Raises:
        ValueError: There are no parts, their encoders had other settings, or frames are missing.
    """
    target, kind, rate = Path(path), codec_named(codec), checked_rate(fps)
    if not parts:
        raise ValueError(f"there are no parts of {target}; expected at least one")
    if audio is not None and next(audio.blocks(), None) is None:
        audio = None  # some players stop at an empty track
    form = container_of(kind, target)
    sound = (audio, sound_encoder(kind, target)) if audio else None
    with whole_file(target, overwrite=others is None, others=others) as draft, errors_name(target):
        with new_container(draft.part, form, metadata or {}, exact=True) as output:
            found = _joined(parts, output, rate, sound, passed)
        if frames not in (None, found):
            raise ValueError(f"the parts of {target} have {found} frames; expected {frames}")
    return draft.path


def _joined(
    parts: Sequence[Path],
    output: OutputContainer,
    rate: Fraction,
    audio: tuple[Sound, str] | None,
    passed: Callable[[int], object],
) -> int:
    """Copy all parts, and the sound with its encoder along with them; return the frames."""
    delay, done = _delay(parts, rate), 0
    settings, stream, sound = b"", None, None  # settings of the decoder are in the file once
    for part in parts:
        with av.open(f"file:{part}") as file:
            own: Any = file.streams.video[0]
            found, offset = bytes(own.codec_context.extradata or b""), done
            if stream is None:
                settings, stream = found, copied_stream(output, own, rate)
                stream.codec_context.codec_tag = own.codec_context.codec_tag
                sound = audio and SoundTrack(audio[0], output, audio[1])
            elif found != settings:
                raise ValueError(f"{part} has other settings of the encoder than {parts[0]}")
            for packet, number in _packets(file, rate):
                packet.pts, packet.dts = offset + number, done - delay
                packet.time_base, packet.duration, packet.stream = 1 / rate, 1, stream
                output.mux(packet)
                done += 1
                if sound:
                    sound.write_until(done / rate)
                passed(1)
    if sound:
        sound.close()
    return done


def _delay(parts: Sequence[Path], rate: Fraction) -> int:
    """Return how many frames decoding is ahead of showing, in the part where it is most."""
    found = 0
    for part in parts:
        with av.open(f"file:{part}") as file:
            if not file.streams.video[0].codec_context.has_b_frames:
                return 0
            numbers = enumerate(number for _, number in _packets(file, rate))
            found = max(found, *(at - number for at, number in numbers))
    return found


def _packets(file: InputContainer, rate: Fraction) -> Iterator[tuple[Packet, int]]:
    """Yield the packets of a part in the order of decoding, and the numbers of their frames."""
    for packet in file.demux(file.streams.video[0]):
        if packet.size and packet.pts is not None:
            yield packet, round(packet.pts * packet.time_base * rate)
