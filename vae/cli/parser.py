"""Commands and options of the command line, and the parsing of their values."""

import argparse
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from ..media.codecs import CODECS

PROGRAM = "fast-video-vae"
DTYPES = {
    "float32": "float32", "fp32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip
TASKS = ("decode", "encode", "both")
PRECISIONS = ("auto", "int8")
DEMO_FOLDER = Path("fast-video-vae-out")

_INT8 = (
    "int8: large convolutions in 8 bits where that costs least, at most about 1 dB below bf16 "
    "(info FILE --precision int8 measures it); default: auto, by --dtype"
)

# Adds an argument to a command, as `ArgumentParser.add_argument` does.
Add = Callable[..., Any]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: error: {message}; see {self.prog} --help\n")


def parse(argv: Sequence[str] | None, version: str) -> argparse.Namespace:
    """Parse a command line."""
    parser = _Parser(
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
    if args.command == "info" and args.devices and not args.file:
        parser.error("--devices needs a FILE")
    if args.command == "info" and args.precision == "int8" and not args.file:
        parser.error("--precision needs a FILE")
    if args.command == "info" and not (args.file or args.backends or args.device is not None):
        parser.error("info takes a FILE, --backends or --device")
    return args


def _add_common(command: str, add: Add) -> None:
    if command == "info":
        text = "describe a device such as cpu or cuda:0; default: CUDA if available"
        add("--device", nargs="?", const="", help=text)
    else:
        add("--device", help="such as cpu or cuda:0; default: CUDA if available")
    text = "dtype of computation: fp32, bf16 or fp16; default: by device"
    add("--dtype", type=_dtype, help=text)
    add("--encode-dtype", type=_dtype, metavar="DTYPE", help="dtype of encoding only")
    if command != "info":
        text = "latent frames per step; -1: all; default: by memory"
        add("--chunk", type=_chunk, help=text)
    add("-q", "--quiet", action="store_true", help="print only the result and errors")
    add("--debug", action="store_true", help="show the traceback of errors")


def _demo(add: Add) -> None:
    add("video", nargs="?", type=Path, metavar="VIDEO", help="a video; default: the bundled clip")
    add("--vae", type=Path, metavar="FILE", help="the VAE; default: the small bundled one")
    text = (
        "folder of NAME_decoded.mp4 and NAME_sheet.png for a video NAME.mp4, or of "
        "NAME_2_decoded.mp4 and so on if they exist; default: %(default)s"
    )
    add("--out", type=Path, default=DEMO_FOLDER, metavar="DIR", help=text)
    _add_overwrite(add)
    _add_stretch(add)
    _add_tile(add)
    _add_precision(add, f"{_INT8}; the encode is not affected")


def _encode(add: Add) -> None:
    add("video", type=Path, metavar="VIDEO", help="a video in any format that FFmpeg reads")
    add("--vae", type=Path, required=True, metavar="FILE", help="the VAE")
    add("-o", "--output", type=Path, required=True, metavar="LATENTS", help="x.safetensors")
    _add_overwrite(add)
    _add_stretch(add)
    _add_tile(add)
    _add_precision(add, argparse.SUPPRESS)  # of older scripts, without an effect
    _add_devices(add)


def _decode(add: Add) -> None:
    add("latents", type=Path, metavar="LATENTS", help="from encode, or saved by ComfyUI")
    add("--vae", type=Path, required=True, metavar="FILE", help="the VAE")
    text = "x.mp4, .webm, .mkv, .mov; x.png or .exr: a new folder x with an image per frame"
    add("-o", "--output", type=Path, required=True, metavar="VIDEO", help=text)
    _add_overwrite(add)
    add("--fps", type=_fps, help="such as 24 or 30000/1001; default: the video's, or 16")
    text = "range of frames of the video, counted from 0; default: all"
    add("--frames", type=_frame_range, metavar="40-80", help=text)
    text = "default: h264 for .mp4, vp9 for .webm, ffv1 for .mkv, prores for .mov"
    add("--codec", choices=CODECS, help=text)
    text = "higher is better and larger; default: 70, no visible loss; lossless codecs ignore it"
    add("--video-quality", type=_quality, metavar="0-100", help=text)
    text = "bits per component; default: h264 8, hevc, vp9, av1 and prores 10, ffv1, png and exr 16"
    add("--bit-depth", type=_bit_depth, metavar="8|10|16", help=text)
    text = "dither to 8 bits, so that smooth areas have no bands; default: if the codec is lossy"
    add("--dither", action=argparse.BooleanOptionalAction, help=text)
    text = "store the alpha channel of a VAE with four channels; default: if the codec has one"
    add("--alpha", action=argparse.BooleanOptionalAction, help=text)
    _add_tile(add)
    _add_precision(add, _INT8)
    _add_devices(add)
    add("--hardware", action="store_true", help="prefer a hardware encoder")
    add("--audio", type=Path, metavar="FILE", help="audio or video file whose audio is added")


def _bench(add: Add) -> None:
    add("--vae", type=Path, metavar="FILE", help="the VAE; default: the small bundled one")
    add("--size", type=_size, default="512x320", metavar="WxH", help="default: %(default)s")
    add("--frames", type=_count, default=17, metavar="N", help="default: %(default)s")
    add("--rounds", type=_count, default=3, metavar="N", help="runs of each; default: %(default)s")
    add("--task", choices=TASKS, default="decode", help="default: %(default)s")
    add("-o", "--output", type=Path, metavar="CHART", help="a bar chart, x.png")
    add("--json", type=Path, metavar="FILE", help="all figures, including each round")
    _add_overwrite(add)


def _info(add: Add) -> None:
    text = "the VAE; optional with --backends or --device"
    add("file", nargs="?", type=Path, metavar="FILE", help=text)
    add("--backends", action="store_true", help="list the ops of each backend on this machine")
    add("--limit", type=_gib, metavar="GIB", help="plan for this memory; default: free memory")
    _add_devices(add)
    text = "int8: measure what a decode with int8 loses, in all and by layer; default: auto"
    _add_precision(add, text)


def _add_overwrite(add: Add) -> None:
    text = "replace files that exist; default: never. Folders of images must be new"
    add("--overwrite", action="store_true", help=text)


def _add_stretch(add: Add) -> None:
    """Add the options for the part of a video, its frame rate and size."""
    text = (
        "frames per second; the frame nearest in time is used; default: all frames, or at a "
        "varying rate a constant one that keeps the timing"
    )
    add("--fps", type=_fps, help=text)
    text = "resize to cover this size, and crop about the centre"
    add("--size", type=_size, metavar="WxH", help=text)
    text = "seconds to skip at the start"
    add("--start", type=_seconds, default=0.0, metavar="S", help=text)
    add("--duration", type=_seconds, metavar="S", help="seconds; default: to the end")
    add("--frames-limit", type=_count, metavar="N", help="most frames")


def _add_tile(add: Add) -> None:
    text = "size of tiles in pixels, with the same result; default: by memory"
    add("--tile", type=_size, metavar="WxH", help=text)


def _add_precision(add: Add, text: str) -> None:
    add("--precision", choices=PRECISIONS, default="auto", help=text)


def _add_devices(add: Add) -> None:
    text = "share each video between devices, such as cuda:0,cuda:1; the first has the weights"
    add("--devices", type=_devices, metavar="NAMES", help=text)
    text = "shares of the work such as 2,1, or memory: by what is free; default: equal ones"
    add("--shares", type=_shares, metavar="SHARES", help=text)


# Each command: its help, more text for its own help, and its arguments.
_COMMANDS = {
    "demo": (
        "Encode and decode a video: the result, a contact sheet and the PSNR.",
        " On a CPU a long or large video is reduced to about half a minute of work; --size, "
        "--duration and --frames-limit change this.",
        _demo,
    ),
    "encode": ("Encode a video to a latent file.", "", _encode),
    "decode": ("Decode a latent file to a video.", "", _decode),
    "bench": (
        "Compare with the plain reference and diffusers: seconds, memory and difference.",
        "",
        _bench,
    ),
    "info": ("Describe a VAE file and the memory it takes.", "", _info),
}


def _dtype(text: str) -> str:
    """Return PyTorch's name of a dtype."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[text]


def _devices(text: str) -> list[str]:
    """Parse names of devices with commas between them."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as cuda:0,cuda:1")
    return names


def _shares(text: str) -> list[float] | str:
    """Parse shares with commas between them, or the word for those by memory."""
    if text == "memory":
        return text
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 2,1") from None


def _chunk(text: str) -> int:
    """Parse latent frames per step; -1: all."""
    if not text.removeprefix("-").isdecimal() or not (int(text) > 0 or int(text) == -1):
        raise argparse.ArgumentTypeError(f"{text!r} is not -1 or a number of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _gib(text: str) -> int:
    """Parse GiB, as bytes."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB such as 6 or 0.5")
    return int(value * 2**30)


def _quality(text: str) -> int:
    if not text.isdecimal() or int(text) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return int(text)


def _bit_depth(text: str) -> int | None:
    """Parse bits per component; auto: None."""
    if text not in ("auto", "8", "10", "16"):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, 8, 10 or 16")
    return None if text == "auto" else int(text)


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds such as 2.5")
    return value


def _number(text: str) -> float:
    """Parse a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _size(text: str) -> tuple[int, int]:
    """Parse WxH as (height, width)."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 832x480")
    return int(height), int(width)


def _frame_range(text: str) -> range:
    """Parse an inclusive range of frames."""
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
