"""Run the README's two commands as a new user would: in a fresh clone and a fresh environment.

`python tests/tools/readme_commands.py --python 3.12` takes a version, a command or a file, and runs
both with the newest PyAV that pip resolves and with PyAV 16; it exits with 1 if one failed. The
commands are read from README.md. PyTorch for Linux is some gigabytes: `--torch-from VENV` links it
and what it requires from a venv of the same Python version, and installs everything else.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The extra that each command installs.
EXTRAS = {"demo": "cli", "test": "test"}
NEWEST = "newest"

_VERSIONS = "from importlib.metadata import version as v; print('torch', v('torch'), 'av', v('av'))"

# The files and folders of torch and its dependencies in a venv. Without setuptools: a venv of
# Python before 3.12 has its own, which pip must replace.
_TORCH = """
import importlib.metadata as metadata, json, re
todo, found, names = ["torch"], set(), {"setuptools"}
while todo:
    name = todo.pop()
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    if name in names:
        continue
    names.add(name)
    found |= {str(package.locate_file(each.parts[0])) for each in package.files or ()}
    for line in package.requires or ():
        if "extra ==" not in line:
            todo.append(re.match(r"[A-Za-z0-9._-]+", line)[0].lower().replace("_", "-"))
print(json.dumps(sorted(each for each in found if not each.endswith(("..", "__pycache__")))))
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


def command(name: str) -> str:
    """Return a line of the README that installs and tries the package."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf'(?m)^pip install "\.\[{EXTRAS[name]}\]" && \S.*$', readme)
    return line


def link_torch(venv: Path, base: Path) -> None:
    """Link torch and what it requires from one venv into another of the same Python version."""
    (packages,) = venv.glob("lib/python*/site-packages")
    for entry in map(Path, json.loads(run(base / "bin/python", "-c", _TORCH))):
        if not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)


def main() -> int:
    """Run what the command line names; return 1 if a command failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--python", default=sys.executable, help="a version, a command or a file")
    add("--av", nargs="+", default=[NEWEST, "16"], help=f"versions of PyAV, or {NEWEST}")
    add("--torch", metavar="VERSION", help="a version of PyTorch, such as 2.6.0")
    add("--torch-from", metavar="VENV", type=Path, help="a venv to link torch from")
    add("--only", choices=EXTRAS, help="one of the two commands")
    args = parser.parse_args()
    version = re.fullmatch(r"3\.\d+", args.python)
    python = interpreter(args.python) if version else shutil.which(args.python)
    if python is None:
        sys.exit(f"error: there is no Python {args.python} here")
    failed = False
    for av, name in itertools.product(args.av, [args.only] if args.only else EXTRAS):
        started = time.monotonic()
        try:
            said = _try(command(name), python, av, args)
        except StepError as error:
            said, failed = f"failed: {error}", True
        print(f"{name}, PyAV {av}, {time.monotonic() - started:.0f} s: {said}", flush=True)
    return int(failed)


def _try(line: str, python: str, av: str, args: argparse.Namespace) -> str:
    """Run a command in a clone; return the versions that it installed."""
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        clone, venv = Path(folder) / "clone", Path(folder) / "venv"
        ignored = shutil.ignore_patterns(".git", ".*_cache", "venv", "build", "*.egg-info")
        shutil.copytree(ROOT, clone, ignore=ignored)
        inside = new_environment(venv, python)
        if args.torch_from is not None:
            link_torch(venv, args.torch_from)
        if args.torch is not None:
            pip(inside, f"torch=={args.torch}")
        if av != NEWEST:
            pip(inside, f"av=={av}.*")
        path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        run("bash", "-o", "pipefail", "-c", line, folder=clone, PATH=path, VIRTUAL_ENV=str(venv))
        return run(inside, "-c", _VERSIONS).strip()


if __name__ == "__main__":
    sys.exit(main())
