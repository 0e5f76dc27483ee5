"""Files that are seen whole or not at all, and what is left of them when the process is ended."""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# What a write says when there is no room, and Python does not say where: disk, quota, limit.
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

# Files that do not have their final name yet: what is left of them goes when the process is ended.
unfinished: set[Path] = set()
# Called when a file is about to take its final name: from there on the work counts as finished.
before_naming: list[Callable[[], None]] = []


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file so that it is seen whole or not at all.

    Args:
        path: The final name.

    Yields:
        An empty file in the same folder, to be written by its name. When the body ends it takes
        the place of `path`; when the body raises, it is removed, and what was there stays.

    Raises:
        OSError: The folder is missing or may not be written, or the disk is full.
        ValueError: `path` is a folder or a device.
    """
    path = Path(path)
    final = path.resolve()  # a link keeps pointing where it points; the file there is replaced
    part = final.with_name(f".{final.name[:40]}.{secrets.token_hex(4)}.part")
    unfinished.add(part)  # a signal may also come while the file is made or removed
    try:
        _check_replaceable(path)
        # Not tempfile: its files are the user's alone, and this one goes by the umask.
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())  # some disks say only here that they are full
        for finish in before_naming:
            finish()
        part.replace(final)
        unfinished.discard(part)
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to tell
            part.unlink(missing_ok=True)
            unfinished.discard(part)
        if isinstance(error, OSError):
            unnamed = error.filename is None and error.errno in _NO_ROOM
            if unnamed or error.filename in (str(part), str(final)):
                raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_unfinished() -> None:
    """Remove what a signal left of files that were being written, in the middle of a removal."""
    for path in list(unfinished):
        with suppress(OSError):
            path.unlink(missing_ok=True)
            unfinished.discard(path)


def _check_replaceable(path: Path) -> None:
    """A device or a folder must not be replaced by a file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device"
        raise ValueError(f"{path} is {kind}; expected the name of a file to write")
