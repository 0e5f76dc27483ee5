"""The files that a registry of node packs publishes: the tree without those of `.comfyignore`."""

import subprocess
from fnmatch import fnmatch
from pathlib import PurePosixPath

from ..nodes.checkout import PACK


def tree_files() -> list[PurePosixPath]:
    """Return the files of this tree, as paths in the pack.

    In a clone the files that git tracks or would track; elsewhere those that it would track.
    """
    if (PACK / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=PACK, capture_output=True, text=True, check=True)
        found = [PurePosixPath(name) for name in listed.stdout.split("\0") if name]
    else:
        every = (PurePosixPath(path.relative_to(PACK).as_posix()) for path in PACK.rglob("*"))
        ignored = _patterns(".gitignore")
        found = [path for path in every if not _matches(path, ignored)]
    return sorted(path for path in set(found) if (PACK / path).is_file())


def published_files() -> list[PurePosixPath]:
    """The files that a release of this tree would have, as paths in the pack."""
    ignored = _patterns(".comfyignore")
    return [path for path in tree_files() if not _matches(path, ignored)]


def _patterns(name: str) -> list[str]:
    """The lines of a file such as .gitignore."""
    lines = (PACK / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _matches(path: PurePosixPath, patterns: list[str]) -> bool:
    """Whether git's rules for one name, of a file or of a folder, leave a path out."""
    for pattern in patterns:
        name = pattern.removeprefix("/").rstrip("/")
        if "/" in name:
            raise ValueError(f"{pattern!r} is ignored; expected the name of a file or folder")
        parts = path.parts[:-1] if pattern.endswith("/") else path.parts
        at_root = pattern.startswith("/")
        if any(fnmatch(part, name) for part in (parts[:1] if at_root else parts)):
            return True
    return False
