"""The formats that videos are written in: which file each goes into, and which encoder makes it.

A format has encoders in software, of which a build of PyAV has one or none, and encoders in
hardware, which a build names whether the machine has them or not: those are tried before they are
believed. PyAV is imported where it is first asked, so that the names can be shown without it.
"""

import logging
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import cast

from .encoder_options import DEFAULT_QUALITY, options_of, pixel_format_of

LOG = logging.getLogger(__name__)
# Container and audio encoder by the suffix of the file.
CONTAINERS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "webm"}
SOUNDS = {".mp4": "aac", ".m4v": "aac", ".mov": "aac", ".mkv": "flac", ".webm": "libopus"}
# Side of the pictures that hardware is tried with: no encoder has a larger least size.
PROBE_SIDE = 256
PROBE_FRAMES = 3


@dataclass(frozen=True)
class Codec:
    """A format of videos.

    Attributes:
        name: One of `CODECS`.
        suffixes: Every suffix whose container takes it; the first where nothing else is asked for.
        software: Encoders by FFmpeg's names, the preferred one first.
        hardware: Encoders that need a certain chip, in the order they are tried.
        audio: Encoder of the sound in a file of the first suffix; see also `sound_encoder`.
        even: The multiples that height and width must be.
        least: The least height and width in pixels.
    """

    name: str
    suffixes: tuple[str, ...]
    software: tuple[str, ...]
    hardware: tuple[str, ...] = ()
    audio: str = "aac"
    even: tuple[int, int] = (2, 2)
    least: int = 1

    @property
    def suffix(self) -> str:
        """What its files are called where nothing else is asked for."""
        return self.suffixes[0]


_MP4 = (".mp4", ".mov", ".m4v", ".mkv")
_CHIPS = ("nvenc", "videotoolbox", "qsv", "amf")
_TABLE = {
    codec.name: codec
    for codec in (
        Codec("h264", _MP4, ("libx264",), tuple(f"h264_{chip}" for chip in _CHIPS)),
        # Below the 64 pixels of its largest block x265 4.2 writes past its memory.
        Codec("hevc", _MP4, ("libx265",), tuple(f"hevc_{chip}" for chip in _CHIPS), least=64),
        Codec("vp9", (".webm", ".mkv", ".mp4"), ("libvpx-vp9",), ("vp9_qsv",), "libopus"),
        # SVT-AV1 4.1 crashes at a width of 16.
        Codec(
            "av1",
            (".mp4", ".webm", ".mkv"),
            ("libsvtav1", "libaom-av1"),
            ("av1_nvenc", "av1_qsv", "av1_amf"),
            least=64,
        ),
        Codec("ffv1", (".mkv",), ("ffv1",), audio="flac", even=(1, 1)),
        # The other one is 2 dB better, a third as fast, and on noise 16 times slower.
        Codec("prores", (".mov", ".mkv"), ("prores", "prores_ks"), audio="pcm_s16le", even=(1, 2)),
    )
}
CODECS = tuple(_TABLE)


def codec_named(name: str) -> Codec:
    """The format of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in _TABLE:
        raise ValueError(f"codec is {name!r}; expected one of {', '.join(CODECS)}")
    return _TABLE[name]


def codec_for(path: Path) -> Codec:
    """The format that a name asks for by its suffix: that of the first codec which is called so.

    Raises:
        ValueError: The suffix is no video's.
    """
    suffix = path.suffix.lower().replace(".m4v", ".mp4")
    found = next((codec for codec in _TABLE.values() if codec.suffix == suffix), None)
    if found is None:
        raise ValueError(
            f"{path} is not named as a video; expected a name such as x.mp4, x.webm, x.mkv or x.mov"
        )
    return found


def container_of(codec: Codec, path: Path) -> str:
    """FFmpeg's name of the container that a name asks for.

    Raises:
        ValueError: The suffix is no video's, or its container does not take the codec.
    """
    codec_for(path)
    suffix = path.suffix.lower()
    if suffix not in codec.suffixes:
        expected = " or ".join(codec.suffixes)
        raise ValueError(f"{path} is not a file for {codec.name}; expected {expected}")
    return CONTAINERS[suffix]


def sound_encoder(codec: Codec, path: Path) -> str:
    """FFmpeg's name of the encoder for the sound beside a video.

    Raises:
        ValueError: This build of PyAV has it not.
    """
    suffix = path.suffix.lower()
    name = codec.audio if suffix == codec.suffix else SOUNDS[suffix]
    if not _built_in(name):
        raise ValueError(f"this build of PyAV has no encoder {name}, for the sound in {path}")
    return name


def check_size(name: str, height: int, width: int) -> None:
    """Refuse a size that one of `CODECS` cannot store, before any work is done.

    Raises:
        ValueError: The codec halves the chroma of a side that is odd, or a side is too small.
    """
    codec = codec_named(name)
    if min(height, width) < codec.least:
        raise ValueError(
            f"frames are {width}x{height}; {codec.name} needs at least {codec.least}x{codec.least}"
        )
    if height % codec.even[0] or width % codec.even[1]:
        sides = "even width and height" if codec.even[0] > 1 else "an even width"
        raise ValueError(
            f"frames are {width}x{height}; {codec.name} needs {sides}: "
            "crop or pad them, or use ffv1, which takes any size"
        )


def available_codecs() -> tuple[str, ...]:
    """Those of `CODECS` that this build of PyAV has a software encoder for."""
    return tuple(codec.name for codec in _TABLE.values() if _software(codec) is not None)


def find_encoder(codec: Codec, hardware: bool = False) -> str:
    """FFmpeg's name of the encoder to use.

    Encoders in hardware are tried once each in the life of the process, on a few small pictures;
    where none works, it is the one in software.

    Raises:
        ValueError: This build of PyAV has no encoder for it.
    """
    if hardware:
        working = (name for name in codec.hardware if _works(name))
        if (name := next(working, None)) is not None:
            return name
        if codec.hardware:
            text = "Fast Video VAE: no hardware encoder for %s works here; software takes over"
            LOG.info(text, codec.name)
    if (name := _software(codec)) is None:
        have = ", ".join(available_codecs()) or "none"
        raise ValueError(
            f"this build of PyAV has no encoder for {codec.name}; expected one of those it has: "
            f"{have}"
        )
    return name


def _software(codec: Codec) -> str | None:
    return next((name for name in codec.software if _built_in(name)), None)


@cache
def _built_in(name: str) -> bool:
    import av  # noqa: PLC0415, asked when used
    from av.codec.codec import UnknownCodecError  # noqa: PLC0415

    try:
        av.Codec(name, "w")
    except UnknownCodecError:
        return False
    return True


@cache
def _works(name: str) -> bool:
    """Whether an encoder in hardware opens, and gives packets for a few pictures."""
    if not _built_in(name):
        return False
    import av  # noqa: PLC0415
    from av.error import FFmpegError  # noqa: PLC0415

    try:
        context = cast(av.VideoCodecContext, av.CodecContext.create(name, "w"))
        context.width = context.height = PROBE_SIDE
        context.pix_fmt = pixel_format_of(name)
        context.time_base, context.framerate = Fraction(1, 24), Fraction(24)
        context.options = options_of(name, DEFAULT_QUALITY)
        packets = []
        for index in range(PROBE_FRAMES):
            frame = av.VideoFrame(PROBE_SIDE, PROBE_SIDE, pixel_format_of(name))
            for plane in frame.planes:
                plane.update(bytes([128]) * plane.buffer_size)
            frame.pts, frame.time_base = index, Fraction(1, 24)
            packets += context.encode(frame)
        packets += context.encode(None)
    except (FFmpegError, OSError, ValueError, RuntimeError) as error:
        LOG.debug("%s does not work here: %s", name, error)
        return False
    return any(packet.size for packet in packets)
