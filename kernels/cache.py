"""The folder for files that are made on the user's machine, and writing one of them.

Environment:
    FAST_VIDEO_VAE_CACHE: The folder, instead of the platform's.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Older temporary files and folders were left by a process that was killed; no build takes so long.
_STALE_S = 3600


def folder(name: str) -> Path:
    """Return the cache folder for files of the kind `name`; it may not exist."""
    if chosen := os.environ.get("FAST_VIDEO_VAE_CACHE"):
        root = Path(chosen)
    elif sys.platform == "darwin":
        root = _home() / "Library" / "Caches" / "fast-video-vae"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "fast-video-vae"
    return root.absolute() / name


def _home() -> Path:
    """Return the user's folder; without one, a path where nothing is found and nothing written."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


def replace(path: Path, content: bytes) -> None:
    """Write a file at once, so that no reader and no crash finds a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_stale(path.parent, "*.tmp")
    handle, name = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def clear_stale(folder: Path, pattern: str) -> None:
    """Remove what a process that was killed has left in `folder`."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def key_of(texts: Iterable[str], files: Iterable[Path]) -> str:
    """Return the hash of texts, and of the names and contents of files."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]
