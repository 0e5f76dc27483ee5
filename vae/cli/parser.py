"""The words of the command line: commands, options, and what each value means as it was typed."""

import argparse
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..media.codecs import CODECS

PROGRAM = "fast-video-vae"
DTYPES = {
    "float32": "float32", "fp32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip
TASKS = ("decode", "encode", "both")
DEMO_FOLDER = Path("fast-video-vae-out")

# Adds an argument to a command, as `ArgumentParser.add_argument`.
Add = Callable[..., Any]


def parse(argv: Sequence[str] | None, version: str) -> argparse.Namespace:
    """The arguments of a command line, None: that of the process.

    Wrong usage raises `SystemExit(2)`, and `--version` prints the version and ends.
    """
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Encode and decode videos with the VAE of Wan, Qwen-Image or SeedVR2.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (text, more, add_arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text}{more}")
        _add_common(name, command.add_argument)
        add_arguments(command.add_argument)
    args = parser.parse_args(argv)
    if args.command == "info" and not (args.file or args.backends or args.device is not None):
        parser.error("info takes a FILE, --backends or --device")
    return args


def _add_common(command: str, add: Add) -> None:
    if command == "info":
        text = "tell what a device is and does, such as cpu or cuda:0; default: as for the others"
        add("--device", nargs="?", const="", help=text)
    else:
        add("--device", help="such as cpu or cuda:0; default: CUDA where there is one")
    text = "of the computation: fp32, bf16 or fp16; default: by device"
    add("--dtype", type=_dtype, help=text)
    add("--encode-dtype", type=_dtype, metavar="DTYPE", help="of encoding alone")
    if command != "info":
        text = "latent frames per step; -1: all; default: by memory"
        add("--chunk", type=_chunk, help=text)
    add("-q", "--quiet", action="store_true", help="print the result and errors only")
    add("--debug", action="store_true", help="let errors show their traceback")


def _demo(add: Add) -> None:
    add("video", nargs="?", type=Path, metavar="VIDEO", help="a video; default: the bundled clip")
    add("--vae", type=Path, metavar="FILE", help="the VAE; default: the small bundled one")
    text = (
        "default: %(default)s; it gets NAME_decoded.mp4 and NAME_sheet.png of a video NAME.mp4, "
        "which the same video replaces; another of that name gets NAME_2_decoded.mp4 and so on"
    )
    add("--out", type=Path, default=DEMO_FOLDER, metavar="DIR", help=text)
    _add_stretch(add)
    _add_tile(add)


def _encode(add: Add) -> None:
    add("video", type=Path, metavar="VIDEO", help="a video in any format that FFmpeg reads")
    add("--vae", type=Path, required=True, metavar="FILE", help="the VAE")
    add("-o", "--output", type=Path, required=True, metavar="LATENTS", help="x.safetensors")
    _add_stretch(add)
    _add_tile(add)


def _decode(add: Add) -> None:
    add("latents", type=Path, metavar="LATENTS", help="from encode, or a latent of ComfyUI")
    add("--vae", type=Path, required=True, metavar="FILE", help="the VAE")
    text = "x.mp4, .webm, .mkv, .mov"
    add("-o", "--output", type=Path, required=True, metavar="VIDEO", help=text)
    add("--fps", type=_fps, help="such as 24 or 30000/1001; default: the video's, or 16")
    text = "of the video, counted from 0; default: all"
    add("--frames", type=_frame_range, metavar="40-80", help=text)
    text = "default: h264 for .mp4, vp9 for .webm, ffv1 for .mkv, prores for .mov"
    add("--codec", choices=CODECS, help=text)
    text = "more is better and bigger; default: 70, which shows no loss; not for ffv1"
    add("--video-quality", type=_quality, metavar="0-100", help=text)
    _add_tile(add)
    add("--hardware", action="store_true", help="encode on a chip made for it, where one works")
    add("--audio", type=Path, metavar="FILE", help="the sound of this file along with the video")


def _bench(add: Add) -> None:
    add("--vae", type=Path, metavar="FILE", help="the VAE; default: the small bundled one")
    add("--size", type=_size, default="512x320", metavar="WxH", help="default: %(default)s")
    add("--frames", type=_count, default=17, metavar="N", help="default: %(default)s")
    add("--rounds", type=_count, default=3, metavar="N", help="of each, default: %(default)s")
    add("--task", choices=TASKS, default="decode", help="default: %(default)s")
    add("-o", "--output", type=Path, metavar="CHART", help="a bar chart, x.png")
    add("--json", type=Path, metavar="FILE", help="all figures, those of every round too")


def _info(add: Add) -> None:
    text = "the VAE; optional with --backends or --device"
    add("file", nargs="?", type=Path, metavar="FILE", help=text)
    add("--backends", action="store_true", help="tell which backend does what on this machine")
    add("--limit", type=_gib, metavar="GIB", help="how it would run in so much memory")


def _add_stretch(add: Add) -> None:
    """What part of a video is taken, at which rate and size."""
    text = (
        "frames per second: the nearest in time; default: all frames, or where their rate varies a "
        "constant one that keeps the timing"
    )
    add("--fps", type=_fps, help=text)
    text = "resize to cover it, and crop about the centre"
    add("--size", type=_size, metavar="WxH", help=text)
    text = "seconds to leave out before"
    add("--start", type=_seconds, default=0.0, metavar="S", help=text)
    add("--duration", type=_seconds, metavar="S", help="seconds to take; default: to the end")
    add("--frames-limit", type=_count, metavar="N", help="frames to take at most")


def _add_tile(add: Add) -> None:
    text = "tiles of that many pixels, with the same result; default: by memory"
    add("--tile", type=_size, metavar="WxH", help=text)


# Of each command: what it does, what its own help adds, and its arguments.
_COMMANDS = {
    "demo": (
        "Encode and decode a video: the result, a contact sheet and the PSNR.",
        " On a CPU a long or large video is cut to about half a minute of work; --size, --duration "
        "and --frames-limit take more of it.",
        _demo,
    ),
    "encode": ("Encode a video to a latent file.", "", _encode),
    "decode": ("Decode a latent file to a video.", "", _decode),
    "bench": (
        "Race against the plain reference, and diffusers: seconds, memory and the difference.",
        "",
        _bench,
    ),
    "info": ("Tell what a VAE file is, and the memory that it takes.", "", _info),
}


def _dtype(text: str) -> str:
    """PyTorch's name of a dtype."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DTYPES)}")
    return DTYPES[text]


def _chunk(text: str) -> int:
    """Latents per step; -1: all."""
    if not text.removeprefix("-").isdecimal() or not (int(text) > 0 or int(text) == -1):
        raise argparse.ArgumentTypeError(f"{text!r} is neither -1 nor a number of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _gib(text: str) -> int:
    """Bytes of what is given in GiB."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB such as 6 or 0.5")
    return int(value * 2**30)


def _quality(text: str) -> int:
    if not text.isdecimal() or int(text) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return int(text)


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds such as 2.5")
    return value


def _number(text: str) -> float:
    """A number, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _size(text: str) -> tuple[int, int]:
    """Height and width, of what is written the other way round."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 832x480")
    return int(height), int(width)


def _frame_range(text: str) -> range:
    """Frames from the first to the last, both taken."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of frames such as 40-80")
    return range(int(first), int(last) + 1)


def _fps(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 24 or 30000/1001")
    return value
