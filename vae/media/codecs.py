"""Video formats: the containers that hold them, and the encoders that write them.

A build of PyAV has at most one software encoder of a format. It lists hardware encoders whether the
machine has them or not, so each is tried before it is used. PyAV is imported on first use, so that
the names of formats are available without it.

A sequence of images (`png`, `exr`) is a format too: a folder with an image per frame.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import cast

from .encoder_options import DEFAULT_QUALITY, is_semiplanar, options_of

LOG = logging.getLogger(__name__)
# Container and audio encoder by the suffix of the file.
CONTAINERS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "webm"}
SOUNDS = {".mp4": "aac", ".m4v": "aac", ".mov": "aac", ".mkv": "flac", ".webm": "libopus"}
# Side of the frames that test a hardware encoder; none has a larger minimum.
PROBE_SIDE = 256
PROBE_FRAMES = 3
# Pixel formats by bits per component; a hardware encoder takes the second one of a pair.
YUV420 = {8: ("yuv420p", "nv12"), 10: ("yuv420p10le", "p010le")}


@dataclass(frozen=True)
class Codec:
    """A video format."""

    name: str
    suffixes: tuple[str, ...]  # of containers that can hold it; the first is the default
    software: tuple[str, ...]  # FFmpeg's names of encoders, the preferred one first
    hardware: tuple[str, ...] = ()
    audio: str = "aac"  # encoder for the default suffix; `SOUNDS` has the others
    even: tuple[int, int] = (2, 2)  # height and width are multiples of these
    least: int = 1  # smallest height and width
    bit_depth: int = 10  # unless the caller chooses
    # FFmpeg's pixel formats by bits per component.
    formats: Mapping[int, tuple[str, ...]] = field(default_factory=lambda: YUV420)
    alpha_formats: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    lossy: bool = True

    @property
    def suffix(self) -> str:
        """Default suffix of its files."""
        return self.suffixes[0]

    @property
    def is_sequence(self) -> bool:
        """Whether it is a folder with an image per frame."""
        return self.suffix not in CONTAINERS


@dataclass(frozen=True)
class Encoding:
    """How frames are stored; the names are FFmpeg's."""

    encoder: str
    bit_depth: int
    pixel_format: str


_MP4 = (".mp4", ".mov", ".m4v", ".mkv")
_CHIPS = ("nvenc", "videotoolbox", "qsv", "amf")
# prores_ks is 2 dB better, but takes 3 times as long, and 16 times as long on noise.
_PRORES = ((".mov", ".mkv"), ("prores", "prores_ks"), (), "pcm_s16le")
_TABLE = {
    codec.name: codec
    for codec in (
        Codec(
            # Few players decode h264 in 10 bits.
            "h264",
            _MP4,
            ("libx264",),
            tuple(f"h264_{chip}" for chip in _CHIPS),
            bit_depth=8,
        ),
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
        Codec(
            "ffv1",
            (".mkv",),
            ("ffv1",),
            audio="flac",
            even=(1, 1),
            bit_depth=16,
            formats={8: ("bgr0",), 10: ("gbrp10le",), 16: ("gbrp16le",)},
            alpha_formats={8: ("bgra",), 10: ("gbrap10le",), 16: ("gbrap16le",)},
            lossy=False,
        ),
        Codec("prores", *_PRORES, even=(1, 2), formats={10: ("yuv422p10le",)}),
        Codec(
            "prores4444",
            *_PRORES,
            even=(1, 2),
            formats={10: ("yuv444p10le",)},
            alpha_formats={10: ("yuva444p10le",)},
        ),
        Codec(
            "png",
            (".png",),
            ("png",),
            audio="",
            even=(1, 1),
            bit_depth=16,
            formats={8: ("rgb24",), 16: ("rgb48be",)},
            alpha_formats={8: ("rgba",), 16: ("rgba64be",)},
            lossy=False,
        ),
        Codec(
            "exr",
            (".exr",),
            ("exr",),
            audio="",
            even=(1, 1),
            bit_depth=16,
            formats={16: ("gbrpf32le",)},
            alpha_formats={16: ("gbrapf32le",)},
            lossy=False,
        ),
    )
}
CODECS = tuple(_TABLE)


def codec_named(name: str) -> Codec:
    """Return the format of one of the names `CODECS`."""
    if name not in _TABLE:
        raise ValueError(f"codec is {name!r}; expected one of {', '.join(CODECS)}")
    return _TABLE[name]


def codec_for(path: Path) -> Codec:
    """Return the first format whose default suffix a file has."""
    suffix = path.suffix.lower().replace(".m4v", ".mp4")
    found = next((codec for codec in _TABLE.values() if codec.suffix == suffix), None)
    if found is None:
        raise ValueError(
            f"{path} is not a video file; expected a name such as x.mp4, x.webm, x.mkv, x.mov, "
            "x.png or x.exr"
        )
    return found


def container_of(codec: Codec, path: Path) -> str:
    """Return FFmpeg's name of the container for a suffix; "image2": a sequence of images."""
    codec_for(path)
    suffix = path.suffix.lower()
    if suffix not in codec.suffixes:
        expected = " or ".join(codec.suffixes)
        raise ValueError(f"{path} is not a file for {codec.name}; expected {expected}")
    return CONTAINERS.get(suffix, "image2")


def sound_encoder(codec: Codec, path: Path) -> str:
    """Return FFmpeg's name of the audio encoder for the suffix of a file."""
    if codec.is_sequence:
        raise ValueError(f"{codec.name} is a sequence of images; expected a video codec for audio")
    suffix = path.suffix.lower()
    name = codec.audio if suffix == codec.suffix else SOUNDS[suffix]
    if not _built_in(name):
        raise ValueError(f"this build of PyAV has no encoder {name} for the audio of {path}")
    return name


def check_size(name: str, height: int, width: int) -> None:
    """Check that a codec can store frames of a size, before any work is done."""
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


def check_depth(name: str, bit_depth: int | None, alpha: bool = False) -> None:
    """Check that a codec can store frames of a depth, before any work is done."""
    codec = codec_named(name)
    if bit_depth is not None and bit_depth not in codec.formats:
        depths = " or ".join(map(str, codec.formats))
        raise ValueError(f"bit depth is {bit_depth}; {name} stores {depths} bits per component")
    if alpha and not codec.alpha_formats:
        have = ", ".join(codec.name for codec in _TABLE.values() if codec.alpha_formats)
        raise ValueError(f"{name} stores no alpha channel; expected one of {have}, or no alpha")


def available_codecs() -> tuple[str, ...]:
    """Return the names of `CODECS` for which this build of PyAV has a software encoder."""
    return tuple(codec.name for codec in _TABLE.values() if _software(codec) is not None)


def find_encoding(
    codec: Codec, *, bit_depth: int | None = None, alpha: bool = False, hardware: bool = False
) -> Encoding:
    """Choose encoder and pixel format; hardware encoders are tried once on a few frames.

    Without a `bit_depth` it is the codec's, or the next lower that this build of PyAV has.
    """
    check_depth(codec.name, bit_depth, alpha)
    if (software := _software(codec)) is None:
        have = ", ".join(available_codecs()) or "none"
        raise ValueError(
            f"this build of PyAV has no encoder for {codec.name}; expected one of those it has: "
            f"{have}"
        )
    lower = sorted((each for each in codec.formats if each <= codec.bit_depth), reverse=True)
    for depth in lower if bit_depth is None else [bit_depth]:
        known = (codec.alpha_formats if alpha else codec.formats)[depth]
        for name in (*codec.hardware, software) if hardware else (software,):
            pixels = _pixel_format(name, known)
            if pixels is None or (name != software and not _works(name, pixels)):
                continue
            if hardware and codec.hardware and name == software:
                _report_software(codec.name)
            return Encoding(name, depth, pixels)
    stored = codec.alpha_formats if alpha else codec.formats
    bits = [str(depth) for depth, known in stored.items() if _pixel_format(software, known)]
    raise ValueError(
        f"bit depth is {bit_depth or codec.bit_depth}{' with alpha' if alpha else ''}; {software} "
        f"of this build of PyAV stores {' or '.join(bits) or 'no'} bits per component"
    )


@cache
def _report_software(name: str) -> None:
    LOG.info("Fast Video VAE: no hardware encoder for %s works here; software is used", name)


def _software(codec: Codec) -> str | None:
    return next((name for name in codec.software if _built_in(name)), None)


def _pixel_format(encoder: str, known: tuple[str, ...]) -> str | None:
    """Return the first of the `known` pixel formats that an encoder takes, or None."""
    taken = set(_pixel_formats(encoder))
    ordered = reversed(known) if is_semiplanar(encoder) else known
    return next((name for name in ordered if name in taken), None)


@cache
def _pixel_formats(encoder: str) -> tuple[str, ...]:
    if not _built_in(encoder):
        return ()
    import av  # noqa: PLC0415

    return tuple(each.name for each in av.Codec(encoder, "w").video_formats or ())


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
def _works(name: str, pixel_format: str) -> bool:
    """Return whether a hardware encoder opens and encodes a few frames."""
    import av  # noqa: PLC0415
    from av.error import FFmpegError  # noqa: PLC0415

    try:
        context = cast(av.VideoCodecContext, av.CodecContext.create(name, "w"))
        context.width = context.height = PROBE_SIDE
        context.pix_fmt = pixel_format
        context.time_base, context.framerate = Fraction(1, 24), Fraction(24)
        context.options = options_of(name, DEFAULT_QUALITY, pixel_format)
        packets = []
        for index in range(PROBE_FRAMES):
            frame = av.VideoFrame(PROBE_SIDE, PROBE_SIDE, pixel_format)
            for plane in frame.planes:
                plane.update(bytes([128]) * plane.buffer_size)
            frame.pts, frame.time_base = index, Fraction(1, 24)
            packets += context.encode(frame)
        packets += context.encode(None)
    except (FFmpegError, OSError, ValueError, RuntimeError) as error:
        LOG.debug("%s does not work here: %s", name, error)
        return False
    return any(packet.size for packet in packets)
