"""Files and folders that appear only when complete, and the removal of partial ones by a signal."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# The errors of a write without room (disk, quota, file size limit), where Python names no file.
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

# Partial files and folders, without their final name yet. They are removed when the process ends.
unfinished: set[Path] = set()
# Called just before a file takes its final name; from then on the work counts as finished.
before_naming: list[Callable[[], None]] = []


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty file in the same folder, which replaces `path` when the body is complete."""
    path = Path(path)
    with _appearing(path, path.resolve()) as part:
        _check_replaceable(path)
        # Not tempfile: its files are private to the user, and this one follows the umask.
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())  # some disks report only here that they are full


@contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new folder, which takes the name `path` when complete; an empty one may be there."""
    path = Path(path)
    final = path.resolve()
    with _appearing(path, final) as part:
        if final.exists() and not (final.is_dir() and not any(final.iterdir())):
            raise ValueError(f"{path} exists already; expected the name of a new folder")
        part.mkdir()
        yield part
        with suppress(FileNotFoundError):
            final.rmdir()  # Windows does not replace a folder


@contextmanager
def _appearing(path: Path, final: Path) -> Iterator[Path]:
    """Give what the body makes the name `final`, or remove it after an error.

    A symbolic link `path` is kept, and what it points to is replaced.
    """
    part = final.with_name(f".{final.name[:40]}.{secrets.token_hex(4)}.part")
    unfinished.add(part)  # a signal may arrive while it is created or removed
    try:
        yield part
        for finish in before_naming:
            finish()
        part.replace(final)
        unfinished.discard(part)
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to raise
            _remove(part)
            unfinished.discard(part)
        if isinstance(error, OSError):
            unnamed = error.filename is None and error.errno in _NO_ROOM
            named = str(error.filename).startswith(str(part)) or error.filename == str(final)
            if unnamed or named:
                raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_unfinished() -> None:
    """Remove all partial files after a signal."""
    for path in list(unfinished):
        with suppress(OSError):
            _remove(path)
            unfinished.discard(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # A thread that goes on writing no longer finds it.
        gone = path.with_suffix(".gone")
        path.replace(gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


def _check_replaceable(path: Path) -> None:
    """Refuse to replace a device or a folder by a file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device"
        raise ValueError(f"{path} is {kind}; expected the name of a file to write")
