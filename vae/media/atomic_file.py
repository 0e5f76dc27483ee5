"""Files and folders that appear only when complete, and the removal of partial ones by a signal.

A name that exists is not replaced unless the caller asks for it: a name is taken by a step that
fails if it exists (a hard link, an exclusive creation, the renaming of a folder), on network disks
too. So several processes and machines can write to one folder.
"""

import errno
import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# The errors of a write without room (disk, quota, file size limit), where Python names no file.
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

# Partial files and folders, without their final name yet. They are removed when the process ends.
unfinished: set[Path] = set()
# Called just before a file takes its final name; from then on the work counts as finished.
before_naming: list[Callable[[], None]] = []


@dataclass
class Draft:
    """A file or folder in the making: `part` until the body is complete, then `path`."""

    part: Path
    path: Path


@contextmanager
def whole_file(
    path: str | os.PathLike[str], *, overwrite: bool = False, others: Iterator[Path] | None = None
) -> Iterator[Draft]:
    """Yield an empty file in the same folder, which gets the name `path` when it is complete.

    If that is taken by then, it gets the next free one of `others` in this folder, by default
    `x_2.mp4` and so on; `overwrite` replaces the older file instead.
    """
    path = Path(path)
    with _appearing(path, path.suffix, others, overwrite=overwrite) as draft:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a device"
            raise ValueError(f"{path} is {kind}; expected the name of a file to write")
        if others is None and not overwrite and path.exists():
            raise ValueError(f"{path} exists already; expected a new name, or to overwrite it")
        _create(draft.part)
        yield draft
        with draft.part.open("rb+") as file:
            os.fsync(file.fileno())  # some disks report only here that they are full


@contextmanager
def whole_folder(
    path: str | os.PathLike[str], *, others: Iterator[Path] | None = None
) -> Iterator[Draft]:
    """Yield a new folder, which takes its name as a file does; an empty one may be there."""
    path = Path(path)
    with _appearing(path, "", others) as draft:
        if others is None and path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise ValueError(f"{path} exists already; expected the name of a new folder")
        draft.part.mkdir()
        yield draft


@contextmanager
def _appearing(
    path: Path, suffix: str, others: Iterator[Path] | None, *, overwrite: bool = False
) -> Iterator[Draft]:
    """Give what the body makes the first free name, or remove it after an error.

    A symbolic link `path` is kept, and the name is that of what it points to.
    """
    # `x_2.mp4` and so on for `x.mp4`; a long name is cut, as systems limit its bytes.
    stem = path.name.removesuffix(suffix)[:60]
    numbered = (path.with_name(f"{stem}_{number}{suffix}") for number in itertools.count(2))
    final = path.resolve()
    part = final.with_name(f".{final.name[:40]}.{secrets.token_hex(4)}.part")
    draft = Draft(part, path)
    unfinished.add(part)  # a signal may arrive while it is created or removed
    try:
        yield draft
        for finish in before_naming:
            finish()
        if overwrite:
            part.replace(final)
        else:
            names = itertools.chain([path], others or numbered)
            draft.path = next(name for name in names if _takes(part, name.resolve()))
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


def _takes(part: Path, final: Path) -> bool:
    """Give `part` the name `final` unless that is taken; return whether it did."""
    if part.is_dir():
        try:
            with suppress(OSError):
                final.rmdir()  # an empty one, which Windows does not replace
            part.rename(final)
        except OSError:
            if not final.exists():
                raise
            return False
        return True
    try:
        os.link(part, final)
    except FileExistsError:
        # A network disk may repeat a request that succeeded.
        if not (final.exists() and part.samefile(final)):
            return False
    except OSError:
        return _takes_without_links(part, final)
    with suppress(OSError):  # the file has its name, whatever happens to the other one
        part.unlink()
    return True


def _takes_without_links(part: Path, final: Path) -> bool:
    """Do the same on a disk without links, such as exFAT; for a moment the file is empty."""
    try:
        _create(final)
    except FileExistsError:
        return False
    try:
        part.replace(final)
    except OSError:
        final.unlink()
        raise
    return True


def _create(path: Path) -> None:
    """Create an empty file, which fails if there is one."""
    # Not tempfile: its files are private to the user, and this one follows the umask.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


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
