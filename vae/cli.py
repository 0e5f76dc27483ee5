"""The command line: `fast-video-vae demo | encode | decode | bench | info`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. An error is one line on stderr, and no
file is left half written. The last line on stdout is the result, and `--quiet` leaves only that.
"""

import argparse
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TextIO

from .codecs import CODECS

PROGRAM = "fast-video-vae"
DTYPES = {
    "float32": "float32", "fp32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip
TASKS = ("decode", "encode", "both")
QUALITIES = ("fast", "exact")  # those of kernels, which would bring PyTorch along
DEMO_FOLDER = Path("fast-video-vae-out")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None: those of the process.

    Returns:
        The exit code: 0 done, 1 failed, 130 interrupted. Wrong usage raises `SystemExit(2)`.
    """
    for stream in (sys.stdout, sys.stderr):
        # A file's name may hold what the terminal cannot show.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "info" and not (args.file or args.backends or args.device is not None):
        parser.error("info takes a FILE, --backends or --device")
    try:
        with _notes(args.quiet):
            _run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", code=130)
    except BrokenPipeError:
        # Who read the output has gone; Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if args.debug:
            raise
        return _fail(f'{error.name} is missing; install it with: pip install "{PROGRAM}[cli]"')
    except Exception as error:
        if args.debug:
            raise
        return _fail(_one_line(error))
    return 0


def _run(args: argparse.Namespace) -> None:
    from . import commands  # noqa: PLC0415, with torch; help and wrong usage need not wait for it

    def say(text: str) -> None:
        if not args.quiet:
            print(text, flush=True)

    print(getattr(commands, args.command)(args, say))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Encode and decode videos with the VAE of Wan, Qwen-Image or SeedVR2.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(
        name: str, text: str, *, chunks: bool = True, qualities: bool = True
    ) -> Callable[..., argparse.Action]:
        added = commands.add_parser(name, help=text, description=text)
        _add_common(added, chunks=chunks, qualities=qualities, alone=name == "info")
        return added.add_argument

    add = command("demo", "Encode and decode a video: the result, a contact sheet and the PSNR.")
    add("video", nargs="?", type=Path, metavar="VIDEO", help="a video; default: the bundled clip")
    add("--vae", type=Path, metavar="FILE", help="the VAE; default: the small bundled one")
    add("--out", type=Path, default=DEMO_FOLDER, metavar="DIR", help="default: %(default)s")

    add = command("encode", "Encode a video to a latent file.")
    add("video", type=Path, metavar="VIDEO", help="a video in any format that FFmpeg reads")
    add("--vae", type=Path, required=True, metavar="FILE", help="the VAE")
    add("-o", "--output", type=Path, required=True, metavar="LATENTS", help="x.safetensors")
    add("--fps", type=_fps, help="frames per second: the nearest in time; default: all frames")
    add("--size", type=_size, metavar="WxH", help="resize to cover it, and crop about the centre")
    add("--start", type=_seconds, default=0.0, metavar="S", help="seconds to leave out before")
    add("--duration", type=_seconds, metavar="S", help="seconds to take; default: to the end")
    add("--frames-limit", type=_count, metavar="N", help="frames to take at most")

    add = command("decode", "Decode a latent file to a video.")
    add("latents", type=Path, metavar="LATENTS", help="from encode, or a latent of ComfyUI")
    add("--vae", type=Path, required=True, metavar="FILE", help="the VAE")
    add(
        "-o", "--output", type=Path, required=True, metavar="VIDEO", help="x.mp4, .webm, .mkv, .mov"
    )
    add("--fps", type=_fps, help="such as 24 or 30000/1001; default: the video's, or 16")
    add("--frames", type=_range, metavar="40-80", help="of the video, counted from 0; default: all")
    add(
        "--codec",
        choices=CODECS,
        help="default: h264 for .mp4, vp9 for .webm, ffv1 for .mkv, prores for .mov",
    )
    add(
        "--video-quality",
        type=_quality,
        metavar="0-100",
        help="more is better and bigger; default: 70, which shows no loss; not for ffv1",
    )
    add("--hardware", action="store_true", help="encode on a chip made for it, where one works")
    add("--audio", type=Path, metavar="FILE", help="the sound of this file along with the video")

    text = "Race against the plain reference, and diffusers: seconds, memory and the difference."
    add = command("bench", text, qualities=False)
    add("--vae", type=Path, metavar="FILE", help="the VAE; default: the small bundled one")
    add("--size", type=_size, default="512x320", metavar="WxH", help="default: %(default)s")
    add("--frames", type=_count, default=17, metavar="N", help="default: %(default)s")
    add("--rounds", type=_count, default=3, metavar="N", help="of each, default: %(default)s")
    add("--task", choices=TASKS, default="decode", help="default: %(default)s")
    add("-o", "--output", type=Path, metavar="CHART", help="a bar chart, x.png")
    add("--json", type=Path, metavar="FILE", help="all figures, those of every round too")

    add = command("info", "Tell what a VAE file is, and the memory that it takes.", chunks=False)
    add(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="the VAE; optional with --backends or --device",
    )
    add("--backends", action="store_true", help="tell which backend does what on this machine")
    add("--limit", type=_gib, metavar="GIB", help="how it would run in so much memory")
    return parser


def _add_common(
    parser: argparse.ArgumentParser, *, chunks: bool, qualities: bool = True, alone: bool = False
) -> None:
    add = parser.add_argument
    if alone:
        text = "tell what a device is and does, such as cpu or cuda:0; default: as for the others"
        add("--device", nargs="?", const="", help=text)
    else:
        add("--device", help="such as cpu or cuda:0; default: CUDA where there is one")
    add("--dtype", type=_dtype, help="of the computation: fp32, bf16 or fp16; default: by device")
    add("--encode-dtype", type=_dtype, metavar="DTYPE", help="of encoding alone")
    if qualities:
        add(
            "--quality",
            choices=QUALITIES,
            default="fast",
            help="exact: the very bits of the plain PyTorch reference, slower; default: fast",
        )
    if chunks:
        add("--chunk", type=_chunk, help="latent frames per step; -1: all; default: by memory")
    add("-q", "--quiet", action="store_true", help="print the result and errors only")
    add("--debug", action="store_true", help="let errors show their traceback")


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DTYPES)}")
    return DTYPES[text]


def _chunk(text: str) -> int:
    if not text.removeprefix("-").isdigit() or not (int(text) > 0 or int(text) == -1):
        raise argparse.ArgumentTypeError(f"{text!r} is neither -1 nor a number of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _gib(text: str) -> int:
    """Bytes."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB such as 6 or 0.5")
    return int(value * 2**30)


def _quality(text: str) -> int:
    if not text.isdecimal() or int(text) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds such as 2.5")
    return value


def _size(text: str) -> tuple[int, int]:
    """Height and width, of what is written the other way round."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 832x480")
    return int(height), int(width)


def _range(text: str) -> range:
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


class _LogNotes(logging.Handler):
    """Shows what the package logs."""

    def emit(self, record: logging.LogRecord) -> None:
        _note(record.getMessage().removeprefix("Fast Video VAE: "))


@contextmanager
def _notes(quiet: bool) -> Iterator[None]:
    """Show Python's warnings and the package's log as one line each, or not at all."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not quiet:
            _note(str(message))

    logger = logging.getLogger((__package__ or PROGRAM).partition(".")[0])
    handler = logging.NullHandler() if quiet else _LogNotes()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _note(text: str) -> None:
    # A progress bar, if one is on the screen, steps aside.
    write = sys.modules["tqdm"].tqdm.write if "tqdm" in sys.modules else print
    write(f"note: {text}", file=sys.stderr)


def _fail(text: str, *, code: int = 1) -> int:
    print(f"{PROGRAM}: error: {text}" if code == 1 else f"{PROGRAM}: {text}", file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, (ValueError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"


if __name__ == "__main__":
    sys.exit(main())
