"""Commands and options of the command line, and the parsing of their values."""

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from ..media.codecs import CODECS

PROGRAM = "fast-video-vae"
DTYPES = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip

# Adds an argument to a command, as `ArgumentParser.add_argument` does.
Add = Callable[..., Any]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: error: {message}; see {self.prog} --help\n")


def parse(argv: Sequence[str] | None, version: str) -> argparse.Namespace:
    """Parse a command line."""
    about = "Encode and decode videos with the VAE of Wan, Qwen-Image or SeedVR2."
    parser = _Parser(prog=PROGRAM, description=about)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, add_arguments in _COMMANDS.items():
        text = add_arguments.__doc__ or ""
        command = commands.add_parser(name, help=text.partition("\n")[0], description=text)
        # For commands without these options.
        command.set_defaults(devices=None, shares=None, precision="auto")
        _add_common(name, command.add_argument)
        add_arguments(command.add_argument)
    args = parser.parse_args(argv)
    if args.command == "info" and not args.file:
        if args.devices or args.precision == "int8":
            parser.error(f"--{'devices' if args.devices else 'precision'} needs a FILE")
        if not (args.backends or args.check) and args.device is None:
            parser.error("info takes a FILE, --backends, --check or --device")
    return args


def _value(read: Callable[[str], Any], expected: str, check: Callable[[Any], bool] = bool) -> Add:
    """Return a parser of values, which are what `read` makes of a text if `check` accepts it."""

    def parsed(text: str) -> Any:  # noqa: ANN401, what `read` returns
        with suppress(ValueError, ArithmeticError, LookupError):
            value = read(text)
            if check(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return parsed


def _whole(text: str) -> int:
    """Read decimals alone; `int` takes "+1", "1_0" and " 1" too."""
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _size(text: str) -> tuple[int, int]:
    """Read WxH as (height, width)."""
    width, height = map(_whole, text.lower().split("x"))
    return height, width


def _frame_range(text: str) -> range:
    """Read an inclusive range of frames, or the number of one."""
    first, dash, last = text.partition("-")
    return range(_whole(first), _whole(last if dash else first) + 1)


# Arguments of `add_argument` for kinds of options, and for options of several commands.
_FLAG = {"action": "store_true"}
_FILE = {"type": Path, "metavar": "FILE"}
_DTYPE = {"type": _value(DTYPES.__getitem__, f"one of {', '.join(DTYPES)}")}
_COUNT = {"type": _value(_whole, "a number of at least 1"), "metavar": "N"}
_TIME = _value(float, "a number of seconds such as 2.5", lambda number: 0 <= number < math.inf)
_FPS = {"type": _value(Fraction, "a rate such as 24 or 30000/1001", lambda rate: rate > 0)}
_SIZE = {"type": _value(_size, "a size such as 832x480", all), "metavar": "WxH"}
_TILE = {**_SIZE, "help": "size of tiles in pixels, with the same result; default: by memory"}
_PRECISION = {"choices": ("auto", "int8"), "default": "auto"}
_DEFAULT = "default: %(default)s"
_REPLACES = "replace files that exist; default: never. Folders of images must be new"
_INT8 = (
    "int8: large convolutions in 8 bits where that costs least, at most about 1 dB below bf16 "
    "(info FILE --precision int8 measures it); default: auto, by --dtype"
)


def _add_common(command: str, add: Add) -> None:
    text = "such as cpu or cuda:0; default: CUDA if available"
    if command == "info":
        add("--device", nargs="?", const="", help=f"describe a device {text}")
    else:
        add("--device", help=text)
    add("--dtype", **_DTYPE, help="dtype of computation: fp32, bf16 or fp16; default: by device")
    add("--encode-dtype", **_DTYPE, metavar="DTYPE", help="dtype of encoding only")
    if command != "info":
        chunk = _value(lambda x: -1 if x == "-1" else _whole(x), "-1 or a number of at least 1")
        add("--chunk", type=chunk, help="latent frames per step; -1: all; default: by memory")
    add("-q", "--quiet", **_FLAG, help="print only the result and errors")
    add("--debug", **_FLAG, help="show the traceback of errors")


def _add_stretch(add: Add) -> None:
    """Add the options for the part of a video, its frame rate and size."""
    text = (
        "frames per second; the frame nearest in time is used; default: all frames, or at a "
        "varying rate a constant one that keeps the timing"
    )
    add("--fps", **_FPS, help=text)
    add("--size", **_SIZE, help="resize to cover this size, and crop about the centre")
    add("--start", type=_TIME, default=0.0, metavar="S", help="seconds to skip at the start")
    add("--duration", type=_TIME, metavar="S", help="seconds; default: to the end")
    add("--frames-limit", **_COUNT, dest="limit", help="most frames")


def _add_devices(add: Add) -> None:
    names = _value(
        lambda text: [each.strip() for each in text.split(",")], "a list such as cuda:0,cuda:1", all
    )
    text = "share each video between devices, such as cuda:0,cuda:1; the first has the weights"
    add("--devices", type=names, metavar="NAMES", help=text)
    shares = _value(
        lambda x: x if x == "memory" else [*map(float, x.split(","))], "a list such as 2,1"
    )
    text = "shares of the work such as 2,1, or memory: by what is free; default: equal ones"
    add("--shares", type=shares, metavar="SHARES", help=text)


def _demo(add: Add) -> None:
    """Encode and decode a video: the result, a contact sheet and the PSNR.

    On a CPU a long or large video is reduced to about half a minute of work; --size, --duration and
    --frames-limit change this.
    """
    add("video", nargs="?", type=Path, metavar="VIDEO", help="a video; default: the bundled clip")
    add("--vae", **_FILE, help="the VAE; default: the small bundled one")
    text = (
        "folder of NAME_decoded.mp4 and NAME_sheet.png for a video NAME.mp4, or of "
        "NAME_2_decoded.mp4 and so on if they exist; default: %(default)s"
    )
    add("--out", type=Path, default=Path("fast-video-vae-out"), metavar="DIR", help=text)
    add("--overwrite", **_FLAG, help=_REPLACES)
    _add_stretch(add)
    add("--tile", **_TILE)
    add("--precision", **_PRECISION, help=f"{_INT8}; the encode is not affected")


def _encode(add: Add) -> None:
    """Encode a video to a latent file."""
    add("video", type=Path, metavar="VIDEO", help="a video in any format that FFmpeg reads")
    add("--vae", **_FILE, required=True, help="the VAE")
    add("-o", "--output", type=Path, required=True, metavar="LATENTS", help="x.safetensors")
    add("--overwrite", **_FLAG, help=_REPLACES)
    _add_stretch(add)
    add("--tile", **_TILE)
    # Of older scripts, without an effect.
    add("--precision", **_PRECISION, help=argparse.SUPPRESS)
    _add_devices(add)


def _decode(add: Add) -> None:
    """Decode a latent file to a video."""
    add("latents", type=Path, metavar="LATENTS", help="from encode, or saved by ComfyUI")
    add("--vae", **_FILE, required=True, help="the VAE")
    text = "x.mp4, .webm, .mkv, .mov; x.png or .exr: a new folder x with an image per frame"
    add("-o", "--output", type=Path, required=True, metavar="VIDEO", help=text)
    add("--overwrite", **_FLAG, help=_REPLACES)
    add("--fps", **_FPS, help="such as 24 or 30000/1001; default: the video's, or 16")
    frames = _value(_frame_range, "a range of frames such as 40-80")
    text = "range of frames of the video, counted from 0; default: all"
    add("--frames", type=frames, metavar="40-80", help=text)
    text = "default: h264 for .mp4, vp9 for .webm, ffv1 for .mkv, prores for .mov"
    add("--codec", choices=CODECS, help=text)
    quality = _value(_whole, "a number from 0 to 100", lambda number: number <= 100)
    text = "higher is better and larger; default: 70, no visible loss; lossless codecs ignore it"
    add("--video-quality", type=quality, dest="quality", metavar="0-100", help=text)
    depths = {"auto": None, "8": 8, "10": 10, "16": 16}
    depth = _value(depths.__getitem__, "auto, 8, 10 or 16", lambda _: True)
    text = "bits per component; default: h264 8, hevc, vp9, av1 and prores 10, ffv1, png and exr 16"
    add("--bit-depth", type=depth, metavar="8|10|16", help=text)
    text = "dither to 8 bits, so that smooth areas have no bands; default: if the codec is lossy"
    add("--dither", action=argparse.BooleanOptionalAction, help=text)
    text = "store the alpha channel of a VAE with four channels; default: if the codec has one"
    add("--alpha", action=argparse.BooleanOptionalAction, help=text)
    add("--tile", **_TILE)
    add("--precision", **_PRECISION, help=_INT8)
    _add_devices(add)
    add("--hardware", **_FLAG, help="prefer a hardware encoder")
    add("--audio", **_FILE, help="audio or video file whose audio is added")


def _bench(add: Add) -> None:
    """Compare with the plain reference and diffusers: seconds, memory and difference."""
    add("--vae", **_FILE, help="the VAE; default: the small bundled one")
    add("--size", **_SIZE, default="512x320", help=_DEFAULT)
    add("--frames", **_COUNT, default=17, help=_DEFAULT)
    add("--rounds", **_COUNT, default=3, help="runs of each; default: %(default)s")
    add("--task", choices=("decode", "encode", "both"), default="decode", help=_DEFAULT)
    add("-o", "--output", type=Path, metavar="CHART", help="a bar chart, x.png")
    add("--json", **_FILE, help="all figures, including each round")
    add("--overwrite", **_FLAG, help=_REPLACES)


def _info(add: Add) -> None:
    """Describe a VAE file and the memory it takes."""
    add("file", nargs="?", **_FILE, help="the VAE; optional with --backends, --check or --device")
    add("--backends", **_FLAG, help="list the ops of each backend on this machine")
    add("--check", **_FLAG, help="check what the device computes, as a table to report")
    limit = _value(
        lambda gib: int(float(gib) * 2**30), "a number of GiB such as 6 or 0.5", lambda n: n > 0
    )
    add("--limit", type=limit, metavar="GIB", help="plan for this memory; default: free memory")
    _add_devices(add)
    text = "int8: measure what a decode with int8 loses, in all and by layer; default: auto"
    add("--precision", **_PRECISION, help=text)


# The docstring of each is the help of its command.
_COMMANDS = {"demo": _demo, "encode": _encode, "decode": _decode, "bench": _bench, "info": _info}
