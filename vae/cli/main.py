"""The command line: `fast-video-vae demo | encode | decode | bench | info`.

Exit codes: 0 success, 1 failure, 2 wrong usage, 128 + n ended by signal n (130 Ctrl-C, 129 SIGHUP,
143 SIGTERM). An error is one line on stderr, and no partial file is left. The last line on stdout
is the result; `--quiet` prints only that.
"""

import argparse
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TextIO

from ..media.atomic_file import remove_unfinished
from .parser import PROGRAM, parse
from .signals import Signals, reason

# The package is not on PyPI, so its name there could belong to another project.
REPOSITORY = "https://github.com/fast-video-vae/ComfyUI-FastVideoVAE"
INSTALL = f'pip install ".[cli]" in a clone of {REPOSITORY}'


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: that of the process); return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A file name may have characters that the terminal cannot show.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    with Signals() as signals:
        try:
            code = _outcome(parse(argv, _version()), signals)
            signals.settle()
        except KeyboardInterrupt:
            remove_unfinished()
            number = signals.number or signal.SIGINT
            code = 128 + number
            _print_error(reason(number))
    return code


def _outcome(args: argparse.Namespace, signals: Signals) -> int:
    """Run a command; turn an error into one line and an exit code."""
    try:
        _run(args)
        sys.stdout.flush()
        return 0
    except Exception as error:
        if signals.number:
            raise KeyboardInterrupt from error  # which this error has replaced
        if isinstance(error, BrokenPipeError):
            _to_nowhere(sys.stdout)  # its reader has closed it
        elif args.debug:
            raise
        else:
            _print_error(f"error: {_one_line(error, args.command)}")
        return 1


def _version() -> str:
    """Return the version of the clone that contains this file, or of the installed package."""
    with suppress(OSError):
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
        if found := re.search(r'^name = "fast-video-vae"\nversion = "([^"]+)"', text, re.MULTILINE):
            return found[1]
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(PROGRAM)
    return "unknown: neither installed nor in a clone"


def _run(args: argparse.Namespace) -> None:
    # Of the processes that `torchrun` has started, rank 0 prints and writes the result.
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK") != "0":
        args.quiet = True

    def say(text: str) -> None:
        if not args.quiet:
            print(text, flush=True)

    with _notes(args.quiet):
        from .commands import run  # noqa: PLC0415, help and usage errors need no torch

        if last := run(args, say):
            print(last)


@contextmanager
def _notes(quiet: bool) -> Iterator[None]:
    """Print Python's warnings and the package's log lines as one line each, unless `quiet`."""

    def note(record: logging.LogRecord) -> None:
        # tqdm prints above its progress bar.
        write = sys.modules["tqdm"].tqdm.write if "tqdm" in sys.modules else print
        write(f"note: {record.getMessage().removeprefix('Fast Video VAE: ')}", file=sys.stderr)

    logger = logging.getLogger((__package__ or PROGRAM).partition(".")[0])
    handler, level = logging.NullHandler() if quiet else logging.Handler(), logger.level
    handler.emit = note
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_, **__: logger.info("%s", message)
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _print_error(text: str) -> None:
    try:
        print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)
    except OSError:  # the terminal is closed
        _to_nowhere(sys.stderr)


def _to_nowhere(stream: TextIO) -> None:
    """Discard the buffer of a stream; Python would report an error and exit with 120."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _one_line(error: Exception, command: str) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is missing; install it with: {INSTALL}"
    if "torch" in sys.modules:
        from ...kernels import is_out_of_memory  # noqa: PLC0415, it imports torch
        from ..streaming.memory import exhausted  # noqa: PLC0415, as above

        if is_out_of_memory(error):
            return str(exhausted(error, command))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, (ValueError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"
