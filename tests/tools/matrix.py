"""Test the pack with several releases of PyTorch and of Python, each pair in a fresh venv.

`python tests/tools/matrix.py` runs all of `ROWS`; `--rows 2.6.0/3.11` one. A row makes a venv in a
temporary folder, installs this torch and the pack with its extra `test`, builds the CPU kernels,
runs the tests of `QUICK`, removes the venv, and replaces its line in `tests/benchmarks/matrix.md`.
It exits with 1 if a row failed.

PyTorch for Linux is about 3 GB to download and 7 GB on the disk. pip's own settings choose another
build: `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` finds those for the CPU.
"""

import argparse
import contextlib
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from readme_commands import ROOT, CommandError, inside, interpreter, logged

# The oldest, the newest and some between; the ends with every Python that they are built for.
ROWS = (
    *("2.6.0/3.11", "2.15.0/3.11"),
    *("2.8.0/3.11", "2.9.1/3.11", "2.10.0/3.11", "2.12.1/3.11", "2.13.0/3.11"),
    *("2.6.0/3.10", "2.14.1/3.10"),
    *("2.6.0/3.12", "2.15.0/3.12"),
    *("2.6.0/3.13", "2.15.0/3.13"),
)

# Installed with a torch. Loops in Triton's interpreter fail with NumPy 2.4 from Triton 3.2 to 3.6.
WITH = {f"2.{minor}": ["numpy<2.4"] for minor in range(6, 12)}

SHORT = ["tests/kernels/test_build.py", "tests/vae/models/test_families.py"]
QUICK = [
    *SHORT,
    "tests/kernels/test_convolution.py",
    "tests/kernels/test_dispatch.py",
    "tests/kernels/test_ops.py",
    "tests/kernels/test_triton.py",
    "tests/lora",
    "tests/test_packaging.py",
    "tests/vae/layers",
    "tests/vae/models",
    "tests/vae/streaming/test_float32_switches.py",
]
# Which tests run, by the name in the table. No path: what a plain `pytest` runs.
TESTS = {"short": SHORT, "quick": list(dict.fromkeys(QUICK)), "whole": []}

COLUMNS = ("torch", "Python", "NumPy", "tests", "result", "seconds", "date", "platform")
HEAD = """# PyTorch and Python

Written by `python tests/tools/matrix.py`. Each line is a fresh virtual environment with the newest
packages that pip finds for it. Below PyTorch 2.12, tests of Triton's interpreter are skipped with
NumPy 2.4 or later. The tests `short` are the native build and each family compared with another
implementation, `quick` also the ops, layers and LoRAs; `whole` is a plain `pytest`. Seconds include
the installation.

"""

_NEEDED_BYTES = 12 << 30  # 8 in the venv and 3 while pip unpacks

_BUILD = """
import torch
from fast_video_vae.kernels.native_ops.library import CPU
CPU.load()
print("native kernels for", torch.ops.fast_video_vae.isa())
"""
_VERSIONS = """
import platform, numpy, torch
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print(numpy.__version__, platform.system(), platform.machine() + ",", device)
"""


class StepError(Exception):
    """A step of a row failed; the message is the row's result."""


@dataclass
class Counts:
    """The tests of a row.

    Attributes:
        ran: Those that passed or failed.
        failed: Names of those that failed.
        skipped: How many did not run.
    """

    ran: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: int = 0

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        if self.failed:
            return f"fail: {len(self.failed)} of {self.ran}{skipped}"
        return f"pass: {self.ran}{skipped}"


class Environment:
    """A venv in a temporary folder, a copy of the tree next to it, and what runs in them."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.tree, self._log = folder, folder / "tree", log
        self._variables = inside(folder / "venv") | {
            "FAST_VIDEO_VAE_CACHE": str(folder / "cache"),  # the kernels are built anew
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "HF_HUB_OFFLINE": "1",
        }

    def run(self, *command: str, folder: Path | None = None) -> tuple[int, str]:
        """Run a command with its output in the log; return its exit code and its output.

        Raises:
            StepError: It took too long.
        """
        try:
            return logged(command, folder or self.folder, self._log, self._variables)
        except CommandError as error:
            raise StepError(f"fail: {error}") from None

    def step(self, name: str, *command: str) -> str:
        """Run a command that has to succeed; return its output.

        Raises:
            StepError: It failed.
        """
        code, output = self.run(*command)
        if code:
            raise StepError(f"fail: {name}")
        return output

    def install(self, torch: str, python: str) -> str:
        """Make the venv and install torch, then the pack; return a line about it.

        Raises:
            StepError: One of them cannot be installed.
        """
        self.step("venv", python, "-m", "venv", str(self.folder / "venv"))
        more = next((pins for name, pins in WITH.items() if torch.startswith(f"{name}.")), [])
        pip = "python", "-m", "pip", "install", "--no-cache-dir", "--progress-bar", "off"
        first = [f"torch=={torch}", "setuptools>=77", *more]
        code, output = self.run(*pip, *first)
        if code:
            missing = "No matching distribution found for torch" in output
            reason = f"no torch {torch} for this Python and platform"
            raise StepError(f"not to be had: {reason}" if missing else "fail: installing torch")
        _copy_tree(self.tree)
        # What this torch asks for stays.
        output += self.step("installing the pack", *pip, f"{self.tree}[test]", *first)
        sizes = re.findall(r"Downloading \S+ \(([\d.]+) (kB|MB)\)", output)
        megabytes = sum(float(size) / (1000 if unit == "kB" else 1) for size, unit in sizes)
        return f"{megabytes:.0f} MB downloaded"

    def test(self, paths: Sequence[str], workers: int) -> Counts:
        """Run pytest on the tree; return its counts.

        Raises:
            StepError: It ended early.
        """
        report = self.folder / "report.xml"
        options = ["-q", "-n", str(workers), "-o", "faulthandler_timeout=900"]
        command = ["python", "-m", "pytest", *options, f"--junitxml={report}", *paths]
        code, _ = self.run(*command, folder=self.tree)
        if code not in (0, 1) or not report.exists():
            raise StepError(f"fail: pytest ended with {code}")
        return _counts(report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows that the command line names, and write the table.

    Returns:
        The exit code: 0, or 1 if a row failed.
    """
    args = _arguments(arguments)
    pythons = dict(each.split("=", 1) for each in args.python)
    logs = Path(tempfile.mkdtemp(prefix="matrix-logs-"))
    print(f"output of the commands: {logs}", flush=True)
    failed = False
    for row in args.rows:
        torch, _, version = row.partition("/")
        python = pythons.get(version) or interpreter(version)
        started = time.monotonic()
        cells = {"torch": torch, "Python": version, "NumPy": "", "tests": args.tests}
        cells["platform"] = f"{platform.system()} {platform.machine()}"
        try:
            if python is None:
                raise StepError("not to be had: no such Python on this machine")
            cells |= _run(torch, python, args, logs / f"torch-{torch}-python-{version}.log")
        except StepError as error:
            cells["result"] = str(error)
        failed |= cells["result"].startswith("fail")
        cells["seconds"] = f"{time.monotonic() - started:.0f}"
        cells["date"] = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
        print(_line(cells), flush=True)
        if args.out:
            merge(args.out, cells)
    return int(failed)


def merge(path: Path, cells: dict[str, str]) -> None:
    """Put a row into the table of a file, in place of the same torch, Python and tests.

    Args:
        path: The file, which need not exist.
        cells: Text by column.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [re.split(r"\s*\|\s*", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    rows = [dict(zip(COLUMNS, line, strict=True)) for line in lines[2:]]
    rows = [row for row in rows if _key(row) != _key(cells)]
    rows = sorted([*rows, cells], key=_key)
    table = [_line({name: name for name in COLUMNS}), "|---" * len(COLUMNS) + "|"]
    table += [_line(row) for row in rows]
    path.write_text(HEAD + "\n".join(table) + "\n", encoding="utf-8")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", nargs="+", default=ROWS, metavar="TORCH/PYTHON", help="such as 2.6.0/3.11")
    add("--python", action="append", default=[], metavar="VERSION=PATH", help="again for more")
    add("--out", type=Path, default=ROOT / "tests/benchmarks/matrix.md", metavar="FILE")
    add("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes of pytest")
    add("--keep", action="store_true", help="leave the venv, and print its folder")
    choice = parser.add_mutually_exclusive_group()
    for name, what in (("short", "the build and the families"), ("whole", "a plain pytest")):
        choice.add_argument(
            f"--{name}", dest="tests", action="store_const", const=name, default="quick", help=what
        )
    args = parser.parse_args(arguments)
    for row in args.rows:
        if not re.fullmatch(r"\d+\.\d+\.\d+/3\.\d+", row):
            parser.error(f"the row is {row}; expected one such as 2.6.0/3.11")
    for each in args.python:
        if "=" not in each:
            parser.error(f"--python is {each}; expected one such as 3.12=/usr/bin/python3.12")
    return args


def _run(torch: str, python: str, args: argparse.Namespace, log: Path) -> dict[str, str]:
    """Run one row; return the result, the platform and the version of NumPy."""
    log.write_text("", encoding="utf-8")
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < _NEEDED_BYTES:
        raise StepError(f"fail: {free >> 30} GiB free for the venv, which needs 12")
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="matrix-")
        if args.keep:
            print(f"kept: {folder}", flush=True)
        else:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        environment = Environment(Path(folder), log)
        print(f"torch {torch}: {environment.install(torch, python)}", flush=True)
        output = environment.step("importing torch", "python", "-c", _VERSIONS)
        numpy, _, device = output.splitlines()[-1].partition(" ")
        environment.step("the command", "fast-video-vae", "--help")
        environment.step("the native build", "python", "-c", _BUILD)
        counts = environment.test(TESTS[args.tests], args.workers)
    for name in counts.failed:
        print(f"FAILED {name}", flush=True)
    return {"NumPy": numpy, "platform": device, "result": str(counts)}


def _copy_tree(target: Path) -> None:
    """Copy what a clone of the checkout would have, and the files that git does not know yet."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def _counts(report: Path) -> Counts:
    """Read the tests from pytest's report in XML."""
    counts = Counts()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            counts.skipped += 1
            continue
        counts.ran += 1
        if case.find("failure") is not None or case.find("error") is not None:
            counts.failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts


def _key(cells: dict[str, str]) -> tuple:
    """What a row is found and sorted by."""
    numbers = [tuple(map(int, cells[name].split("."))) for name in ("torch", "Python")]
    return *numbers, list(TESTS).index(cells["tests"])


def _line(cells: dict[str, str]) -> str:
    return f"| {' | '.join(cells[name] for name in COLUMNS)} |"


if __name__ == "__main__":
    sys.exit(main())
