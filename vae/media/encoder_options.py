"""Options of FFmpeg's encoders: speed, and one quality scale for all.

Quality goes from 0 to 100. It is linear in the encoder's own scale between three points: its worst
value at 0, no visible loss at 70, its best lossy value at 100. At 70 all encoders have about the
PSNR of x264 at CRF 16 on a textured moving picture (39.5 to 40.7 dB, 2026-11, PyAV 18.1), far above
the error of a VAE. Dithered and deep pictures have scales of their own, by the error of slopes.
"""

from dataclasses import dataclass, field

DEFAULT_QUALITY = 70


@dataclass(frozen=True)
class _Encoder:
    """The quality options of one encoder, and its other options."""

    keys: tuple[str, ...]
    scale: tuple[float, float, float]  # values of the keys at quality 0, 70 and 100
    options: dict[str, str] = field(default_factory=dict)
    # Value at 70 and more options for pictures of more than 8 bits, or dithered.
    smooth: tuple[float, dict[str, str]] | None = None
    semiplanar: bool = False  # prefers interleaved chroma
    whole: bool = True  # takes whole numbers only

    def value(self, quality: int, usual: float) -> str:
        worst, _, best = self.scale
        if quality <= DEFAULT_QUALITY:
            value = worst + (usual - worst) * quality / DEFAULT_QUALITY
        else:
            share = (quality - DEFAULT_QUALITY) / (100 - DEFAULT_QUALITY)
            value = usual + (best - usual) * share
        return str(round(value)) if self.whole else f"{value:g}"


_NVENC = {"rc": "vbr", "b": "0", "preset": "p5", "tune": "hq"}
_AMF = {"rc": "cqp", "quality": "quality"}
_ENCODERS = {
    # Default CRF of x264: 23; 0 would be a lossless profile that few players support. In `smooth`,
    # adaptive quantization keeps slopes and dither, which would become bands; mbtree and cutree
    # would take their bits for blocks that later frames refer to. Blocks of 64 pixels would be 2
    # levels of 10 bits off.
    "libx264": _Encoder(
        ("crf",),
        (51, 16, 1),
        smooth=(15, {"aq-strength": "2", "mbtree": "0"}),
        whole=False,
    ),
    "libx265": _Encoder(
        ("crf",),
        (51, 17, 1),
        {"preset": "fast", "x265-params": "log-level=error"},
        (17, {"x265-params": "log-level=error:aq-mode=3:aq-strength=2.5:cutree=0:ctu=32"}),
        whole=False,
    ),
    # Without b=0 the CRF is only an upper limit to a bit rate.
    "libvpx-vp9": _Encoder(
        ("crf",),
        (63, 24, 2),
        {"b": "0", "deadline": "good", "cpu-used": "4", "row-mt": "1"},
        (20, {"aq-mode": "1"}),
    ),
    # Its adaptive quantization takes bits from slopes.
    "libsvtav1": _Encoder(
        ("crf",), (63, 16, 2), {"preset": "8"}, (16, {"svtav1-params": "aq-mode=0"})
    ),
    "libaom-av1": _Encoder(("crf",), (63, 16, 2), {"b": "0", "cpu-used": "6", "row-mt": "1"}),
    # RGB without conversion, because YUV would round it. Version 3 has slices, so that all cores
    # work; each slice has a checksum.
    "ffv1": _Encoder((), (0, 0, 0), {"level": "3", "slicecrc": "1"}),
    # Profiles Proxy, LT, 422 and HQ; HQ from the default quality on.
    "prores_ks": _Encoder(("profile",), (0, 3, 3), {"vendor": "apl0"}),
    "prores": _Encoder(("profile",), (0, 3, 3)),
    # Level 1 takes 0.4 times as long as the default, and the files are 0.5 % larger on a noisy
    # gradient in 16 bits (2026-11).
    "png": _Encoder((), (0, 0, 0), {"compression_level": "1", "pred": "paeth"}),
    "exr": _Encoder((), (0, 0, 0), {"format": "half", "compression": "zip16"}),
    "h264_nvenc": _Encoder(("cq",), (51, 16, 1), _NVENC),
    "hevc_nvenc": _Encoder(("cq",), (51, 17, 1), _NVENC),
    "av1_nvenc": _Encoder(("cq",), (51, 16, 2), _NVENC),
    "h264_qsv": _Encoder(("global_quality",), (51, 16, 1), semiplanar=True),
    "hevc_qsv": _Encoder(("global_quality",), (51, 17, 1), semiplanar=True),
    "vp9_qsv": _Encoder(("global_quality",), (255, 60, 5), semiplanar=True),
    "av1_qsv": _Encoder(("global_quality",), (51, 17, 1), semiplanar=True),
    "h264_amf": _Encoder(("qp_i", "qp_p", "qp_b"), (51, 16, 1), _AMF, semiplanar=True),
    "hevc_amf": _Encoder(("qp_i", "qp_p"), (51, 17, 1), _AMF, semiplanar=True),
    "av1_amf": _Encoder(("qp_i", "qp_p"), (255, 60, 5), _AMF, semiplanar=True),
    # Their scale is 1 to 100, in FFmpeg's lambda units of 118.
    "h264_videotoolbox": _Encoder(
        ("global_quality",), (118, 8260, 11800), {"flags": "+qscale"}, semiplanar=True
    ),
    "hevc_videotoolbox": _Encoder(
        ("global_quality",), (118, 8260, 11800), {"flags": "+qscale"}, semiplanar=True
    ),
}


def options_of(
    encoder: str, quality: int | None, pixel_format: str = "", *, dithered: bool = False
) -> dict[str, str]:
    """Return FFmpeg's options for an encoder and a quality of 0 to 100; None: 70."""
    quality = DEFAULT_QUALITY if quality is None else quality
    if not 0 <= quality <= 100:
        raise ValueError(f"quality is {quality}; expected 0 to 100")
    known = _ENCODERS[encoder]
    usual, more = known.scale[1], {}
    if known.smooth is not None and (dithered or "10" in pixel_format):
        usual, more = known.smooth
    options = {**known.options, **more, **dict.fromkeys(known.keys, known.value(quality, usual))}
    if encoder.startswith("prores") and "444p" in pixel_format:
        options["profile"] = "4"  # 4444
    return options


def is_semiplanar(encoder: str) -> bool:
    """Return whether `encoder`, FFmpeg's name, prefers interleaved chroma, as in nv12."""
    return _ENCODERS[encoder].semiplanar
