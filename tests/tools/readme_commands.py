"""Run the README's two commands as a new user would: in a fresh clone and a fresh venv.

`python tests/tools/readme_commands.py` runs them with the installed ones of Python 3.10 to 3.13 (on
PATH or from pyenv), each with the newest PyAV that pip resolves and with PyAV 16. It prints a row
per combination, and exits with 1 if one failed. The commands are read from README.md.

PyTorch for Linux is some gigabytes. `--torch-from VENV` links torch and its dependencies from a
venv of the same Python version, and installs everything else.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
NEWEST = "newest"
COLUMNS = ("python", "torch", "av", "demo", "tests")

# The extra that each command installs.
EXTRAS = {"demo": "cli", "test": "test"}

# The tests take six minutes on two idle cores, an installation of PyTorch more.
_TIMEOUT_S = 3600

_VERSIONS_OF = (
    "import json, importlib.metadata as m; print(json.dumps([m.version(x) for x in {!r}]))"
)

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


@dataclass
class Row:
    """The result of one combination.

    Attributes:
        cells: Text by column.
        failed: Whether a command failed or could not be run.
    """

    cells: dict[str, str] = field(default_factory=dict)
    failed: bool = False


class CommandError(Exception):
    """A command failed; the message says where its output is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names and print the table.

    Returns:
        The exit code: 0, or 1 if a command failed.
    """
    args = _arguments(arguments)
    lines = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    wanted = {name: line for name, line in lines.items() if args.only in (None, name)}
    if "test" in wanted:
        wanted["test"] = f"{wanted['test']} {args.pytest}".rstrip()
    pythons = {name: interpreter(name) for name in args.python or VERSIONS}
    logs = args.logs or Path(tempfile.mkdtemp(prefix="readme-commands-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"output of the commands: {logs}", flush=True)
    rows = []
    for name, python in pythons.items():
        for av in args.av or (NEWEST, "16"):
            row = _missing(name, wanted, asked=bool(args.python))
            if python is not None:
                row = _run(python, av, wanted, args.torch_from, logs)
            rows.append(row)
            print(_line(row.cells), flush=True)
            if python is None:
                break
    print("\n".join(["", _line({each: each for each in COLUMNS}), "|---" * len(COLUMNS) + "|"]))
    print("\n".join(_line(row.cells) for row in rows))
    return int(any(row.failed for row in rows))


def commands(readme: str) -> dict[str, str]:
    """The two lines of the README that install and try the package.

    Raises:
        ValueError: One of them is not there, or there twice.
    """
    found = {}
    for name, extra in EXTRAS.items():
        lines = re.findall(rf'(?m)^pip install "\.\[{extra}\]" && \S.*$', readme)
        if len(lines) != 1:
            raise ValueError(
                f'README.md has {len(lines)} lines `pip install ".[{extra}]" && ...`; expected one'
            )
        found[name] = lines[0]
    return found


def interpreter(name: str) -> str | None:
    """The path of a Python: of a version such as "3.12", of a command, or of a file."""
    if re.fullmatch(r"3\.\d+", name):
        home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        built = sorted(home.glob(f"{name}.*/bin/python"), key=_patch)
        on_path = shutil.which(f"python{name}")
        # pyenv's commands on PATH are scripts, which can exist without this version.
        if on_path is not None and "shims" not in Path(on_path).parts:
            return on_path
        return str(built[-1]) if built else None
    return shutil.which(name)


def link_torch(venv: Path, base: Path) -> None:
    """Link torch and what it requires into a venv.

    Args:
        venv: The fresh one.
        base: One of the same Python version that has torch.

    Raises:
        ValueError: The base has no torch.
    """
    entries = json.loads(_asked(base / "bin/python", _TORCH))
    if not entries:
        raise ValueError(f"{base} has no torch; expected a venv that has it")
    (packages,) = venv.glob("lib/python*/site-packages")
    for entry in map(Path, entries):
        target = packages / entry.name
        if not target.exists():
            target.symlink_to(entry)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = functools.partial(parser.add_argument, action="append")
    add("--python", metavar="3.12", help="a version, command or path; again for more")
    add("--av", metavar="16", help=f"a version of PyAV, or {NEWEST}; again for more")
    add(
        "--torch-from",
        metavar="VENV",
        type=Path,
        default=[],
        help="take torch from here for the Python version that it has; again for more",
    )
    parser.add_argument("--only", choices=list(EXTRAS), help="one of the two commands")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="added to pytest")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="default: a temporary one")
    return parser.parse_args(arguments)


def _missing(name: str, wanted: dict[str, str], *, asked: bool) -> Row:
    cells = {"python": name, "demo": "no such Python here"}
    return Row(cells | ({} if "demo" in wanted else {"tests": cells["demo"]}), failed=asked)


def _run(python: str, av: str, wanted: dict[str, str], bases: Sequence[Path], logs: Path) -> Row:
    """Run the commands with one Python and one PyAV."""
    version = _asked(python, "import platform; print(platform.python_version())").strip()
    row = Row({"python": version, "av": av})
    log = logs / f"python-{version}-av-{av}.log"
    log.write_text("", encoding="utf-8")
    minor = version.rpartition(".")[0]
    with tempfile.TemporaryDirectory(prefix="readme-") as folder, contextlib.ExitStack() as stack:
        clone, venv = Path(folder) / "clone", Path(folder) / "venv"
        stack.callback(_note_versions, row, venv)
        try:
            _clone(clone)
            _call([python, "-m", "venv", str(venv)], clone, log, os.environ)
            for base in bases:
                if (base / f"lib/python{minor}").is_dir():
                    link_torch(venv, base)
            environment = inside(venv)
            if av != NEWEST:
                _call(["pip", "install", f"av=={av}.*"], clone, log, environment)
        except (CommandError, ValueError) as error:
            row.failed = True
            row.cells["demo"] = str(error)
            return row
        for name, line in wanted.items():
            column = "tests" if name == "test" else name
            start = time.monotonic()
            try:
                output = _call(["bash", "-o", "pipefail", "-c", line], clone, log, environment)
                outcome = "ok"
            except CommandError as error:
                output, outcome, row.failed = log.read_text(encoding="utf-8"), str(error), True
            counts = re.findall(r"(?m)^(?:=+ )?(\d+ (?:passed|failed|error).*) in [\d.]+s", output)
            if name == "test" and counts:
                outcome = counts[-1]
            row.cells[column] = f"{outcome}, {time.monotonic() - start:.0f} s"
    return row


def _clone(target: Path) -> None:
    """Clone the checkout, or copy it if it is not a repository."""
    if (ROOT / ".git").exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True)
        return
    ignored = shutil.ignore_patterns(".venv", "venv", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, target, ignore=ignored)


def inside(venv: Path) -> dict[str, str]:
    """The environment of a shell in which a venv is active."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "VIRTUAL_ENV": str(venv), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _call(command: list[str], folder: Path, log: Path, environment: Mapping[str, str]) -> str:
    """Run a command with its output in the log.

    Returns:
        The output.

    Raises:
        CommandError: It failed, or took too long.
    """
    code, output = logged(command, folder, log, environment)
    if code:
        raise CommandError(f"failed with {code}: see {log.name}")
    return output


def logged(
    command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run a command with its output in the log.

    Returns:
        Its exit code and its output.

    Raises:
        CommandError: It took too long.
    """
    program = shutil.which(command[0], path=environment["PATH"]) or command[0]
    before = log.stat().st_size
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        try:
            code = subprocess.run(
                [program, *command[1:]],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise CommandError(f"failed after {_TIMEOUT_S} s: see {log.name}") from None
    return code, log.read_bytes()[before:].decode(errors="replace")


def _note_versions(row: Row, venv: Path) -> None:
    """Put the versions of what was installed into the row."""
    with contextlib.suppress(subprocess.CalledProcessError, OSError):
        row.cells["torch"], row.cells["av"] = json.loads(
            _asked(venv / "bin/python", _VERSIONS_OF.format(["torch", "av"]))
        )


def _asked(python: str | Path, code: str) -> str:
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout


def _patch(python: Path) -> tuple[int, ...]:
    """The version of pyenv's Python, to sort by."""
    return tuple(int(number) for number in re.findall(r"\d+", python.parents[1].name))


def _line(cells: dict[str, str]) -> str:
    return f"| {' | '.join(cells.get(each, '') for each in COLUMNS)} |"


if __name__ == "__main__":
    sys.exit(main())
