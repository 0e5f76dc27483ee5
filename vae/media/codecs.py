"""Video formats: the containers that hold them, and the encoders that write them.

A build of PyAV has at most one software encoder of a format. It lists hardware encoders whether the
machine has them or not, so each is tried before it is used. PyAV is imported on first use, so that
the names of formats are available without it.

A sequence of images (`png`, `exr`) is a format too: a folder with an image per frame.

Quality goes from 0 to 100. It is linear in the encoder's own scale between three points: its worst
value at 0, no visible loss at 70, its best lossy value at 100. At 70 all encoders have about the
PSNR of x264 at CRF 16 on a textured moving picture (39.5 to 40.7 dB, 2026-11, PyAV 18.1), far above
the error of a VAE. Dithered and deep pictures have scales of their own, by the error of slopes.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

LOG = logging.getLogger(__name__)
# Container and audio encoder by the suffix of the file.
CONTAINERS = {
    ".mp4": ("mp4", "aac"),
    ".m4v": ("mp4", "aac"),
    ".mov": ("mov", "aac"),
    ".mkv": ("matroska", "flac"),
    ".webm": ("webm", "libopus"),
}
# Pixel formats by bits per component: one plane per chroma component, or one for both.
PLANAR = {8: "yuv420p", 10: "yuv420p10le"}
INTERLEAVED = {8: "nv12", 10: "p010le"}
CHIPS = ("nvenc", "videotoolbox", "qsv", "amf")  # the preferred one first
DEFAULT_QUALITY = 70
# Side of the frames that test a hardware encoder; none has a larger minimum.
PROBE_SIDE, PROBE_FRAMES = 256, 3


@dataclass(frozen=True)
class Encoder:
    """Options of an encoder; the names and numbers are FFmpeg's."""

    keys: tuple[str, ...] = ()  # options that take the value of the quality
    scale: tuple[float, float, float] = (0, 0, 0)  # values at quality 0, 70 and 100
    options: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[int, str] | None = None  # by bits per component; None: those of the codec
    # Value at 70 and more options for pictures of more than 8 bits, or dithered.
    smooth: tuple[float, Mapping[str, str]] | None = None


@dataclass(frozen=True)
class Codec:
    """A video format."""

    name: str
    suffixes: tuple[str, ...]  # of containers that can hold it; the first is the default
    software: tuple[str, ...]  # encoders, the preferred one first
    audio: str = ""  # encoder for the default suffix, if it is not that of the container
    even: tuple[int, int] = (2, 2)  # height and width are multiples of these
    least: int = 1  # smallest height and width
    bit_depth: int = 10  # unless the caller chooses
    formats: Mapping[int, str] = field(default_factory=lambda: PLANAR)  # by bits per component
    alpha_formats: Mapping[int, str] = field(default_factory=dict)
    lossy: bool = True

    @property
    def suffix(self) -> str:
        """Default suffix of its files."""
        return self.suffixes[0]

    @property
    def is_sequence(self) -> bool:
        """Whether it is a folder with an image per frame."""
        return self.suffix not in CONTAINERS


class Encoding(NamedTuple):
    """How frames are stored; the names are FFmpeg's."""

    encoder: str
    bit_depth: int
    pixel_format: str

    def options(self, quality: int | None, *, dithered: bool = False) -> dict[str, str]:
        """Return the options of the encoder for a quality of 0 to 100; None: 70."""
        quality = DEFAULT_QUALITY if quality is None else quality
        if not 0 <= quality <= 100:
            raise ValueError(f"quality is {quality}; expected 0 to 100")
        known = _ENCODERS[self.encoder]
        (worst, usual, best), more = known.scale, {}
        if known.smooth is not None and (dithered or "10" in self.pixel_format):
            usual, more = known.smooth
        if quality <= DEFAULT_QUALITY:
            value = worst + (usual - worst) * quality / DEFAULT_QUALITY
        else:
            value = usual + (best - usual) * (quality - DEFAULT_QUALITY) / (100 - DEFAULT_QUALITY)
        text = f"{value:g}" if self.encoder in _FRACTIONAL else str(round(value))
        options = {**known.options, **more, **dict.fromkeys(known.keys, text)}
        if self.encoder.startswith("prores") and "444p" in self.pixel_format:
            options["profile"] = "4"  # 4444
        return options


_FRACTIONAL = ("libx264", "libx265")  # other encoders take whole numbers only
_NVENC = {"rc": "vbr", "b": "0", "preset": "p5", "tune": "hq"}
_NVENC_FORMATS = {8: PLANAR[8], 10: INTERLEAVED[10]}
_AMF = {"rc": "cqp", "quality": "quality"}
# The scale of VideoToolbox is 1 to 100, in FFmpeg's lambda units of 118.
_TOOLBOX = Encoder(("global_quality",), (118, 8260, 11800), {"flags": "+qscale"}, INTERLEAVED)
_ENCODERS = {
    # Default CRF of x264: 23; 0 would be a lossless profile that few players support. In `smooth`,
    # adaptive quantization keeps slopes and dither, which would become bands; mbtree and cutree
    # would take their bits for blocks that later frames refer to. Blocks of 64 pixels would be 2
    # levels of 10 bits off.
    "libx264": Encoder(("crf",), (51, 16, 1), smooth=(15, {"aq-strength": "2", "mbtree": "0"})),
    "libx265": Encoder(
        ("crf",),
        (51, 17, 1),
        {"preset": "fast", "x265-params": "log-level=error"},
        smooth=(17, {"x265-params": "log-level=error:aq-mode=3:aq-strength=2.5:cutree=0:ctu=32"}),
    ),
    # Without b=0 the CRF is only an upper limit to a bit rate.
    "libvpx-vp9": Encoder(
        ("crf",),
        (63, 24, 2),
        {"b": "0", "deadline": "good", "cpu-used": "4", "row-mt": "1"},
        smooth=(20, {"aq-mode": "1"}),
    ),
    # Its adaptive quantization takes bits from slopes.
    "libsvtav1": Encoder(
        ("crf",), (63, 16, 2), {"preset": "8"}, smooth=(16, {"svtav1-params": "aq-mode=0"})
    ),
    "libaom-av1": Encoder(("crf",), (63, 16, 2), {"b": "0", "cpu-used": "6", "row-mt": "1"}),
    # RGB without conversion, because YUV would round it. Version 3 has slices, so that all cores
    # work; each slice has a checksum.
    "ffv1": Encoder(options={"level": "3", "slicecrc": "1"}),
    # Profiles Proxy, LT, 422 and HQ; HQ from the default quality on.
    "prores": Encoder(("profile",), (0, 3, 3)),
    # Level 1 takes 0.4 times as long as the default, and the files are 0.5 % larger on a noisy
    # gradient in 16 bits (2026-11).
    "png": Encoder(options={"compression_level": "1", "pred": "paeth"}),
    "exr": Encoder(options={"format": "half", "compression": "zip16"}),
    "h264_nvenc": Encoder(("cq",), (51, 16, 1), _NVENC, _NVENC_FORMATS),
    "hevc_nvenc": Encoder(("cq",), (51, 17, 1), _NVENC, _NVENC_FORMATS),
    "av1_nvenc": Encoder(("cq",), (51, 16, 2), _NVENC, _NVENC_FORMATS),
    "h264_qsv": Encoder(("global_quality",), (51, 16, 1), formats=INTERLEAVED),
    "hevc_qsv": Encoder(("global_quality",), (51, 17, 1), formats=INTERLEAVED),
    "vp9_qsv": Encoder(("global_quality",), (255, 60, 5), formats=INTERLEAVED),
    "av1_qsv": Encoder(("global_quality",), (51, 17, 1), formats=INTERLEAVED),
    "h264_amf": Encoder(("qp_i", "qp_p", "qp_b"), (51, 16, 1), _AMF, INTERLEAVED),
    "hevc_amf": Encoder(("qp_i", "qp_p"), (51, 17, 1), _AMF, INTERLEAVED),
    "av1_amf": Encoder(("qp_i", "qp_p"), (255, 60, 5), _AMF, INTERLEAVED),
    "h264_videotoolbox": _TOOLBOX,
    "hevc_videotoolbox": _TOOLBOX,
}


# RGB of any size, without the loss that quality is about.
_EXACT: dict[str, Any] = {"even": (1, 1), "bit_depth": 16, "lossy": False}
_MP4 = (".mp4", ".mov", ".m4v", ".mkv")
# prores_ks is 2 dB better, but takes 3 times as long, and 16 times as long on noise.
_PRORES = ((".mov", ".mkv"), ("prores",), "pcm_s16le", (1, 2))
_TABLE = (
    Codec("h264", _MP4, ("libx264",), bit_depth=8),  # few players decode h264 in 10 bits
    # Below 64 pixels, its largest block, x265 4.2 writes outside its memory.
    Codec("hevc", _MP4, ("libx265",), least=64),
    Codec("vp9", (".webm", ".mkv", ".mp4"), ("libvpx-vp9",)),
    # SVT-AV1 4.1 crashes at a width of 16.
    Codec("av1", (".mp4", ".webm", ".mkv"), ("libsvtav1", "libaom-av1"), least=64),
    Codec(
        *("ffv1", (".mkv",), ("ffv1",)),
        formats={8: "bgr0", 10: "gbrp10le", 16: "gbrp16le"},
        alpha_formats={8: "bgra", 10: "gbrap10le", 16: "gbrap16le"},
        **_EXACT,
    ),
    Codec("prores", *_PRORES, formats={10: "yuv422p10le"}),
    Codec("prores4444", *_PRORES, formats={10: "yuv444p10le"}, alpha_formats={10: "yuva444p10le"}),
    Codec(
        *("png", (".png",), ("png",)),
        formats={8: "rgb24", 16: "rgb48be"},
        alpha_formats={8: "rgba", 16: "rgba64be"},
        **_EXACT,
    ),
    Codec(
        *("exr", (".exr",), ("exr",)),
        formats={16: "gbrpf32le"},
        alpha_formats={16: "gbrapf32le"},
        **_EXACT,
    ),
)
CODECS = tuple(codec.name for codec in _TABLE)


def codec_named(name: str) -> Codec:
    """Return the format of one of the names `CODECS`."""
    if name not in CODECS:
        raise ValueError(f"codec is {name!r}; expected one of {', '.join(CODECS)}")
    return _TABLE[CODECS.index(name)]


def codec_for(path: Path) -> Codec:
    """Return the first format whose default suffix a file has."""
    suffix = path.suffix.lower().replace(".m4v", ".mp4")
    for codec in _TABLE:
        if codec.suffix == suffix:
            return codec
    raise ValueError(
        f"{path} is not a video file; expected a name such as x.mp4, x.webm, x.mkv, x.mov, x.png "
        "or x.exr"
    )


def container_of(codec: Codec, path: Path) -> str:
    """Return FFmpeg's name of the container for a suffix; "image2": a sequence of images."""
    codec_for(path)
    suffix = path.suffix.lower()
    if suffix not in codec.suffixes:
        expected = " or ".join(codec.suffixes)
        raise ValueError(f"{path} is not a file for {codec.name}; expected {expected}")
    return CONTAINERS.get(suffix, ("image2",))[0]


def sound_encoder(codec: Codec, path: Path) -> str:
    """Return FFmpeg's name of the audio encoder for the suffix of a file."""
    if codec.is_sequence:
        raise ValueError(f"{codec.name} is a sequence of images; expected a video codec for audio")
    suffix = path.suffix.lower()
    name = codec.audio if codec.audio and suffix == codec.suffix else CONTAINERS[suffix][1]
    if not _built_in(name):
        raise ValueError(f"this build of PyAV has no encoder {name} for the audio of {path}")
    return name


def check_size(name: str, height: int, width: int) -> None:
    """Check that a codec can store frames of a size, before any work is done."""
    codec = codec_named(name)
    needs = ""
    if min(height, width) < codec.least:
        needs = f"at least {codec.least}x{codec.least}"
    elif height % codec.even[0] or width % codec.even[1]:
        needs = "even width and height" if codec.even[0] > 1 else "an even width"
        needs += ": crop or pad them, or use ffv1, which takes any size"
    if needs:
        raise ValueError(f"frames are {width}x{height}; {name} needs {needs}")


def available_codecs() -> tuple[str, ...]:
    """Return the names of `CODECS` for which this build of PyAV has a software encoder."""
    return tuple(codec.name for codec in _TABLE if any(map(_built_in, codec.software)))


def find_encoding(
    codec: Codec, bit_depth: int | None = None, *, alpha: bool = False, hardware: bool = False
) -> Encoding:
    """Choose encoder and pixel format; hardware encoders are tried once on a few frames.

    Without a `bit_depth` it is the codec's, or the next lower that this build of PyAV has.
    """
    formats = codec.alpha_formats if alpha else codec.formats
    if bit_depth is not None and bit_depth not in codec.formats:
        bits = " or ".join(map(str, codec.formats))
        raise ValueError(f"bit depth is {bit_depth}; {codec.name} stores {bits} bits per component")
    if not formats:
        have = ", ".join(each.name for each in _TABLE if each.alpha_formats)
        raise ValueError(
            f"{codec.name} stores no alpha channel; expected one of {have}, or no alpha"
        )
    if (software := next(filter(_built_in, codec.software), None)) is None:
        have = ", ".join(available_codecs()) or "none"
        raise ValueError(
            f"this build of PyAV has no encoder for {codec.name}; expected one of those it has: "
            f"{have}"
        )
    chips = [each for chip in CHIPS if (each := f"{codec.name}_{chip}") in _ENCODERS]
    lower = sorted((each for each in codec.formats if each <= codec.bit_depth), reverse=True)
    for depth in lower if bit_depth is None else [bit_depth]:
        for name in (*chips, software) if hardware else (software,):
            found = Encoding(name, depth, (_ENCODERS[name].formats or formats)[depth])
            if found.pixel_format in _pixel_formats(name) and (name == software or _works(found)):
                if hardware and chips and name == software:
                    _report_software(codec.name)
                return found
    bits = [str(bits) for bits, name in formats.items() if name in _pixel_formats(software)]
    raise ValueError(
        f"bit depth is {bit_depth or codec.bit_depth}{' with alpha' if alpha else ''}; {software} "
        f"of this build of PyAV stores {' or '.join(bits) or 'no'} bits per component"
    )


@cache
def _report_software(name: str) -> None:
    LOG.info("Fast Video VAE: no hardware encoder for %s works here; software is used", name)


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
        return bool(av.Codec(name, "w"))
    except UnknownCodecError:
        return False


@cache
def _works(encoding: Encoding) -> bool:
    """Return whether a hardware encoder opens and encodes a few frames."""
    import av  # noqa: PLC0415
    from av.error import FFmpegError  # noqa: PLC0415

    from .encoder_process import Settings, encoded  # noqa: PLC0415

    name, _, pixels = encoding
    options = encoding.options(DEFAULT_QUALITY)
    settings = Settings(name, options, Fraction(24), (PROBE_SIDE, PROBE_SIDE), pixels, {})
    try:
        frame = av.VideoFrame(PROBE_SIDE, PROBE_SIDE, pixels)
        gray = [bytes([128]) * plane.buffer_size for plane in frame.planes]
        encoded(settings, [gray] * PROBE_FRAMES)
    except (FFmpegError, OSError, ValueError, RuntimeError) as error:
        LOG.debug("%s does not work here: %s", name, error)
        return False
    return True
