"""Video formats: the containers that hold them, and the encoders that write them.

A build of PyAV has at most one software encoder of a format. It lists hardware encoders whether the
machine has them or not, so each is tried before it is used. PyAV is imported on first use, so that
the names of formats are available without it.
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
# Side of the frames that test a hardware encoder; none has a larger minimum.
PROBE_SIDE = 256
PROBE_FRAMES = 3


@dataclass(frozen=True)
class Codec:
    """A video format.

    Attributes:
        name: One of `CODECS`.
        suffixes: Suffixes of containers that can hold it; the first is the default.
        software: FFmpeg's names of its software encoders, the preferred one first.
        hardware: FFmpeg's names of its hardware encoders, in the order they are tried.
        audio: Audio encoder for the default suffix; `sound_encoder` has the others.
        even: Height and width must be multiples of these.
        least: Smallest height and width in pixels.
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
        """Default suffix of its files."""
        return self.suffixes[0]


_MP4 = (".mp4", ".mov", ".m4v", ".mkv")
_CHIPS = ("nvenc", "videotoolbox", "qsv", "amf")
_TABLE = {
    codec.name: codec
    for codec in (
        Codec("h264", _MP4, ("libx264",), tuple(f"h264_{chip}" for chip in _CHIPS)),
        # Below 64 pixels, its largest block, x265 4.2 writes outside its memory.
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
        # prores_ks is 2 dB better, but takes 3 times as long, and 16 times as long on noise.
        Codec("prores", (".mov", ".mkv"), ("prores", "prores_ks"), audio="pcm_s16le", even=(1, 2)),
    )
}
CODECS = tuple(_TABLE)


def codec_named(name: str) -> Codec:
    """Return the format of a name.

    Args:
        name: One of `CODECS`.

    Returns:
        The format.

    Raises:
        ValueError: `name` is not one of `CODECS`.
    """
    if name not in _TABLE:
        raise ValueError(f"codec is {name!r}; expected one of {', '.join(CODECS)}")
    return _TABLE[name]


def codec_for(path: Path) -> Codec:
    """Choose a format by the suffix of a file.

    Args:
        path: The file.

    Returns:
        The first format with this default suffix.

    Raises:
        ValueError: The suffix is not that of a video.
    """
    suffix = path.suffix.lower().replace(".m4v", ".mp4")
    found = next((codec for codec in _TABLE.values() if codec.suffix == suffix), None)
    if found is None:
        raise ValueError(
            f"{path} is not a video file; expected a name such as x.mp4, x.webm, x.mkv or x.mov"
        )
    return found


def container_of(codec: Codec, path: Path) -> str:
    """Choose the container by the suffix of a file.

    Args:
        codec: The format of the video.
        path: The file.

    Returns:
        FFmpeg's name of the container.

    Raises:
        ValueError: The suffix is not that of a video, or its container cannot hold the codec.
    """
    codec_for(path)
    suffix = path.suffix.lower()
    if suffix not in codec.suffixes:
        expected = " or ".join(codec.suffixes)
        raise ValueError(f"{path} is not a file for {codec.name}; expected {expected}")
    return CONTAINERS[suffix]


def sound_encoder(codec: Codec, path: Path) -> str:
    """Choose the audio encoder by the suffix of a file.

    Args:
        codec: The format of the video.
        path: The file.

    Returns:
        FFmpeg's name of the encoder.

    Raises:
        ValueError: This build of PyAV does not have it.
    """
    suffix = path.suffix.lower()
    name = codec.audio if suffix == codec.suffix else SOUNDS[suffix]
    if not _built_in(name):
        raise ValueError(f"this build of PyAV has no encoder {name} for the audio of {path}")
    return name


def check_size(name: str, height: int, width: int) -> None:
    """Check that a codec can store frames of a size, before any work is done.

    Args:
        name: One of `CODECS`.
        height: Height in pixels.
        width: Width in pixels.

    Raises:
        ValueError: A side is odd where chroma is halved, or is too small.
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
    """Return the names of `CODECS` for which this build of PyAV has a software encoder."""
    return tuple(codec.name for codec in _TABLE.values() if _software(codec) is not None)


def find_encoder(codec: Codec, hardware: bool = False) -> str:
    """Choose the encoder; hardware encoders are tried once per process on a few frames.

    Args:
        codec: The format.
        hardware: Prefer a hardware encoder that works; else the software encoder is used.

    Returns:
        FFmpeg's name of the encoder.

    Raises:
        ValueError: This build of PyAV has no encoder for it.
    """
    if hardware:
        working = (name for name in codec.hardware if _works(name))
        if (name := next(working, None)) is not None:
            return name
        if codec.hardware:
            text = "Fast Video VAE: no hardware encoder for %s works here; software is used"
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
    import av  # noqa: PLC0415, optional
    from av.codec.codec import UnknownCodecError  # noqa: PLC0415

    try:
        av.Codec(name, "w")
    except UnknownCodecError:
        return False
    return True


@cache
def _works(name: str) -> bool:
    """Return whether a hardware encoder opens and encodes a few frames."""
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
