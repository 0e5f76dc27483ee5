"""Fresh virtual environments: an installation as a user makes it, and the tests with each PyTorch.

`python tests/tools/environments.py` runs all of `ROWS`; `--rows 2.6.0/3.11` one. A row makes a venv
in a temporary folder, installs this torch and the pack with its extra `test`, builds the CPU
kernels, runs tests, removes the venv, and replaces its line in `tests/benchmarks/matrix.md`. It
exits with 1 if a row failed.

PyTorch for Linux is about 3 GB to download and 7 GB on the disk. pip's own settings choose another
build: `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` finds those for the CPU.
"""

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

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

# The tests of each environment: the native build, each family, and what needs no video.
TESTS = ("tests/kernels", "tests/lora", "tests/vae/layers", "tests/vae/models")

COLUMNS = ("torch", "Python", "NumPy", "result", "seconds", "date", "platform")
HEAD = """# PyTorch and Python

Written by `python tests/tools/environments.py`. Each line is a fresh virtual environment with the
newest packages that pip finds for it. Below PyTorch 2.12, tests of Triton's interpreter are skipped
with NumPy 2.4 or later. Where more than 5,000 tests passed, all ran, elsewhere those of kernels,
layers and LoRAs. Seconds include the installation.

"""

_BUILD = """
import torch
from fast_video_vae.kernels.native_ops.build import CPU
CPU.load()
print("native kernels for", torch.ops.fast_video_vae.isa())
"""
_VERSIONS = """
import platform, numpy, torch
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print(numpy.__version__, platform.system(), platform.machine() + ",", device)
"""


class StepError(Exception):
    """A command failed; the message has its name and the end of its output."""


def run(*command: object, folder: Path = ROOT, **variables: str) -> str:
    """Run a command in a folder with these environment variables too; return its output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=kept | variables, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        shown = " ".join(map(str, command))[:200]
        raise StepError(f"failed with {done.returncode}: {shown}\n{done.stdout[-4000:]}")
    return done.stdout


def new_environment(folder: Path, python: str = sys.executable) -> Path:
    """Make a venv in `folder` and return its Python."""
    run(python, "-m", "venv", folder)
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def pip(python: Path, *arguments: object) -> None:
    """Install packages."""
    run(python, "-m", "pip", "install", "--progress-bar", "off", *arguments)


def interpreter(version: str) -> str | None:
    """Return the path of a Python such as 3.12, on PATH or of pyenv; None: there is none."""
    found = shutil.which(f"python{version}")
    # pyenv's commands on PATH are scripts, which can exist without this version.
    if found is not None and "shims" not in Path(found).parts:
        return found
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next((str(path) for path in sorted(home.glob(f"{version}.*/bin/python"))), None)


def copy_tree(target: Path) -> None:
    """Copy what a clone of the checkout would have, and the files that git does not know yet."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def main() -> int:
    """Run the rows of the command line and write the table; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", nargs="+", default=ROWS, metavar="TORCH/PYTHON", help="such as 2.6.0/3.11")
    add("--out", type=Path, default=ROOT / "tests/benchmarks/matrix.md", metavar="FILE")
    args = parser.parse_args()
    failed = False
    for row in args.rows:
        torch, _, version = row.partition("/")
        cells = dict.fromkeys(COLUMNS, "") | {"torch": torch, "Python": version}
        cells["platform"] = f"{platform.system()} {platform.machine()}"
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
            try:
                cells |= _row(torch, interpreter(version), Path(folder))
            except StepError as error:
                missing = "No matching distribution found for torch" in str(error)
                first = str(error).splitlines()[0][:60]
                cells["result"] = "not to be had" if missing else f"fail: {first}"
                failed |= not missing
                print(error, flush=True)
        cells["seconds"] = f"{time.monotonic() - started:.0f}"
        cells["date"] = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
        print(_line(cells.values()), flush=True)
        _merge(args.out, [*cells.values()])
    return int(failed)


def _row(torch: str, python: str | None, folder: Path) -> dict[str, str]:
    """Run one row; return the result, the platform and the version of NumPy."""
    if python is None:
        return {"result": "not to be had: no such Python on this machine"}
    inside, tree = new_environment(folder / "venv", python), folder / "tree"
    pins = WITH.get(torch.rpartition(".")[0], [])
    first = [f"torch=={torch}", "setuptools>=77", *pins]
    pip(inside, *first)
    copy_tree(tree)
    pip(inside, f"{tree}[test]", *first)  # what this torch asks for stays
    numpy, _, device = run(inside, "-c", _VERSIONS).splitlines()[-1].partition(" ")
    fresh = {
        "FAST_VIDEO_VAE_CACHE": str(folder / "cache"),  # the kernels are built anew
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{inside.parent}{os.pathsep}{os.environ['PATH']}",
    }
    run(inside.parent / "fast-video-vae", "--help")
    run(inside, "-c", _BUILD, folder=folder, **fresh)
    output = run(inside, "-m", "pytest", "-q", *TESTS, folder=tree, **fresh)
    passed, skipped = re.search(r"(\d+) passed(, \d+ skipped)?", output.splitlines()[-1]).groups("")
    return {"NumPy": numpy, "platform": device, "result": f"pass: {passed}{skipped}"}


def _merge(path: Path, cells: list[str]) -> None:
    """Put a row into the table of a file, in place of the same torch and Python."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [re.split(r"\s*\|\s*", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    rows = sorted([*(row for row in lines[2:] if _key(row) != _key(cells)), cells], key=_key)
    table = [_line(COLUMNS), "|---" * len(COLUMNS) + "|", *map(_line, rows)]
    path.write_text(HEAD + "\n".join(table) + "\n", encoding="utf-8")


def _key(cells: Sequence[str]) -> list[tuple[int, ...]]:
    """What a row is found and sorted by."""
    return [tuple(map(int, each.split("."))) for each in cells[:2]]


def _line(cells: object) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
