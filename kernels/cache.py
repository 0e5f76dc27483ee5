"""Files that are made on the user's machine: where they are, and how they are written and found.

Files of other versions stay, because several installations can share the folder.

Environment:
    FAST_VIDEO_VAE_CACHE: The folder, instead of the platform's.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import log_once

# Older folders were left by a process that was killed; no build takes so long.
_STALE_S = 3600


def folder(name: str) -> Path:
    """Return the cache folder for files of the kind `name`; it may not exist."""
    if chosen := os.environ.get("FAST_VIDEO_VAE_CACHE"):
        return Path(chosen).absolute() / name
    try:
        home = Path.home()
    except RuntimeError:  # a user without a folder: nothing is found below this, nor written
        home = Path(os.devnull)
    root = home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    if sys.platform != "darwin":
        root = Path(os.environ.get("XDG_CACHE_HOME") or root)
    return root.absolute() / "fast-video-vae" / name


@contextmanager
def building(place: Path) -> Iterator[Path]:
    """Yield a new folder in `place`, which is removed with all files that are not moved away."""
    # On the same disk, so that a file moves at once: no reader and no crash finds a part of it.
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob("building-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_S:
                shutil.rmtree(old)
    work = tempfile.TemporaryDirectory(prefix="building-", dir=place, ignore_cleanup_errors=True)
    with work as name:
        yield Path(name)


def move(made: Path, path: Path) -> None:
    """Move a file, made in a folder of `building`, to its place."""
    try:
        made.replace(path)
    except PermissionError:
        # Windows does not replace a file that another process has opened: it has made it too.
        if sys.platform != "win32" or not path.is_file():
            raise


def keep(path: Path, content: bytes, repeated: str) -> None:
    """Write a file, or log once that every start does what is `repeated` without it."""
    try:
        with building(path.parent) as work:
            made = work / path.name
            made.write_bytes(content)
            move(made, path)
    except OSError as error:
        log_once(
            f"{path.parent} is not writable ({error.strerror}), so every start {repeated} again; "
            "set FAST_VIDEO_VAE_CACHE to a writable folder"
        )


def whole(place: Path, pattern: str) -> Iterator[Path]:
    """Yield the files in `place` that are named after the hash of their content, as it is."""
    for path in place.glob(pattern):
        with suppress(OSError):
            if path.stem == digest(path.read_bytes()):
                yield path


def digest(content: bytes) -> str:
    """Return the hash of some content as the name of a file."""
    return hashlib.sha256(content).hexdigest()[:32]


def key_of(texts: Iterable[str], files: Iterable[Path]) -> str:
    """Return the hash of texts, and of the names and contents of files."""
    parts = [text.encode() for text in texts]
    for path in files:
        parts += [path.name.encode(), path.read_bytes()]
    return digest(b"\0".join([*parts, b""]))
