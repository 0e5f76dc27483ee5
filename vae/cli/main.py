"""The command line: `fast-video-vae demo | encode | decode | bench | info`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 128 + n ended by signal n (130 for Ctrl-C, 129 and 143
for SIGHUP and SIGTERM). An error is one line on stderr, and no file is left half written. The last
line on stdout is the result, and `--quiet` leaves only that.
"""

import argparse
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TextIO

from ..media.atomic_file import remove_unfinished
from ..media.codecs import CODECS
from . import arguments
from .signals import Signals, reason

PROGRAM = "fast-video-vae"
TASKS = ("decode", "encode", "both")
DEMO_FOLDER = Path("fast-video-vae-out")
# It is on no package index, and a name that is free there is anybody's.
REPOSITORY = "https://github.com/fast-video-vae/ComfyUI-FastVideoVAE"
INSTALL = f'pip install ".[cli]" in a clone of {REPOSITORY}'


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None: those of the process.

    Returns:
        The exit code: 0 done, 1 failed, 128 + n ended by signal n. Wrong usage raises
        `SystemExit(2)`.
    """
    for stream in (sys.stdout, sys.stderr):
        # A file's name may hold what the terminal cannot show.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    with Signals() as signals:
        try:
            code = _attempt(_arguments(argv), signals)
            signals.settle()
        except KeyboardInterrupt as error:
            remove_unfinished()
            number = getattr(error, "number", signal.SIGINT)
            code = _fail(reason(number), code=128 + number)
    return code


def _attempt(args: argparse.Namespace, signals: Signals) -> int:
    """Run a command; what goes wrong is one line and an exit code."""
    try:
        with _notes(args.quiet):
            _run(args)
        sys.stdout.flush()
    except Exception as error:
        signals.check()
        if isinstance(error, BrokenPipeError):
            # What read the output has gone.
            _to_nowhere(sys.stdout)
            return 1
        if args.debug:
            raise
        if isinstance(error, ModuleNotFoundError):
            return _fail(f"{error.name} is missing; install it with: {INSTALL}")
        return _fail(_one_line(error, args.command))
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "info" and not (args.file or args.backends or args.device is not None):
        parser.error("info takes a FILE, --backends or --device")
    return args


def _version() -> str:
    """That of the clone that this file lies in, or else of the installed package."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    if project.is_file():
        text = project.read_text(encoding="utf-8")
        found = re.search(r'^name = "fast-video-vae"\nversion = "([^"]+)"', text, re.MULTILINE)
        if found:
            return found[1]
    try:
        return metadata.version(PROGRAM)
    except metadata.PackageNotFoundError:
        return "of unknown number: neither installed nor in a clone"


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
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(
        name: str, text: str, description: str = "", *, chunks: bool = True
    ) -> Callable[..., argparse.Action]:
        added = commands.add_parser(name, help=text, description=description or text)
        _add_common(added, chunks=chunks, alone=name == "info")
        return added.add_argument

    text = (
        "Encode and decode a video: the result, a contact sheet and the PSNR. On a CPU a long or "
        "large video is cut to about half a minute of work; --size, --duration and --frames-limit "
        "take more of it."
    )
    add = command(
        "demo", "Encode and decode a video: the result, a contact sheet and the PSNR.", text
    )
    add("video", nargs="?", type=Path, metavar="VIDEO", help="a video; default: the bundled clip")
    add("--vae", type=Path, metavar="FILE", help="the VAE; default: the small bundled one")
    text = (
        "default: %(default)s; it gets NAME_decoded.mp4 and NAME_sheet.png of a video NAME.mp4, "
        "which the same video replaces; another of that name gets NAME_2_decoded.mp4 and so on"
    )
    add("--out", type=Path, default=DEMO_FOLDER, metavar="DIR", help=text)
    _add_stretch(add)
    _add_tile(add)

    add = command("encode", "Encode a video to a latent file.")
    add("video", type=Path, metavar="VIDEO", help="a video in any format that FFmpeg reads")
    add("--vae", type=Path, required=True, metavar="FILE", help="the VAE")
    add("-o", "--output", type=Path, required=True, metavar="LATENTS", help="x.safetensors")
    _add_stretch(add)
    _add_tile(add)

    add = command("decode", "Decode a latent file to a video.")
    add("latents", type=Path, metavar="LATENTS", help="from encode, or a latent of ComfyUI")
    add("--vae", type=Path, required=True, metavar="FILE", help="the VAE")
    add(
        "-o", "--output", type=Path, required=True, metavar="VIDEO", help="x.mp4, .webm, .mkv, .mov"
    )
    add("--fps", type=arguments.fps, help="such as 24 or 30000/1001; default: the video's, or 16")
    add(
        "--frames",
        type=arguments.frame_range,
        metavar="40-80",
        help="of the video, counted from 0; default: all",
    )
    add(
        "--codec",
        choices=CODECS,
        help="default: h264 for .mp4, vp9 for .webm, ffv1 for .mkv, prores for .mov",
    )
    add(
        "--video-quality",
        type=arguments.quality,
        metavar="0-100",
        help="more is better and bigger; default: 70, which shows no loss; not for ffv1",
    )
    _add_tile(add)
    add("--hardware", action="store_true", help="encode on a chip made for it, where one works")
    add("--audio", type=Path, metavar="FILE", help="the sound of this file along with the video")

    text = "Race against the plain reference, and diffusers: seconds, memory and the difference."
    add = command("bench", text)
    add("--vae", type=Path, metavar="FILE", help="the VAE; default: the small bundled one")
    add(
        "--size", type=arguments.size, default="512x320", metavar="WxH", help="default: %(default)s"
    )
    add("--frames", type=arguments.count, default=17, metavar="N", help="default: %(default)s")
    add(
        "--rounds",
        type=arguments.count,
        default=3,
        metavar="N",
        help="of each, default: %(default)s",
    )
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
    add("--limit", type=arguments.gib, metavar="GIB", help="how it would run in so much memory")
    return parser


def _add_stretch(add: Callable[..., argparse.Action]) -> None:
    """What part of a video is taken, at which rate and size."""
    text = (
        "frames per second: the nearest in time; default: all frames, or where their rate varies a "
        "constant one that keeps the timing"
    )
    add("--fps", type=arguments.fps, help=text)
    text = "resize to cover it, and crop about the centre"
    add("--size", type=arguments.size, metavar="WxH", help=text)
    text = "seconds to leave out before"
    add("--start", type=arguments.seconds, default=0.0, metavar="S", help=text)
    text = "seconds to take; default: to the end"
    add("--duration", type=arguments.seconds, metavar="S", help=text)
    text = "frames to take at most"
    add("--frames-limit", type=arguments.count, metavar="N", help=text)


def _add_tile(add: Callable[..., argparse.Action]) -> None:
    text = "tiles of that many pixels, with the same result; default: by memory"
    add("--tile", type=arguments.size, metavar="WxH", help=text)


def _add_common(parser: argparse.ArgumentParser, *, chunks: bool, alone: bool = False) -> None:
    add = parser.add_argument
    if alone:
        text = "tell what a device is and does, such as cpu or cuda:0; default: as for the others"
        add("--device", nargs="?", const="", help=text)
    else:
        add("--device", help="such as cpu or cuda:0; default: CUDA where there is one")
    add(
        "--dtype",
        type=arguments.dtype,
        help="of the computation: fp32, bf16 or fp16; default: by device",
    )
    add("--encode-dtype", type=arguments.dtype, metavar="DTYPE", help="of encoding alone")
    if chunks:
        add(
            "--chunk",
            type=arguments.chunk,
            help="latent frames per step; -1: all; default: by memory",
        )
    add("-q", "--quiet", action="store_true", help="print the result and errors only")
    add("--debug", action="store_true", help="let errors show their traceback")


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
    line = f"{PROGRAM}: error: {text}" if code == 1 else f"{PROGRAM}: {text}"
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # the terminal is closed
        _to_nowhere(sys.stderr)
    return code


def _to_nowhere(stream: TextIO) -> None:
    """Drop what a stream still holds: Python would complain of it, and exit with 120."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _one_line(error: Exception, command: str) -> str:
    if "torch" in sys.modules:
        from ...kernels import is_out_of_memory  # noqa: PLC0415, it imports torch
        from ..layers.oom import exhausted  # noqa: PLC0415, as above

        if is_out_of_memory(error):
            return str(exhausted(error, command))
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, (ValueError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"
