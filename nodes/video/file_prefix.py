"""Checks of a file name, before frames for the file are computed."""

import os
import re
from pathlib import Path, PurePosixPath

from ..host.error_text import described

# Bytes of a file name that all systems support, without the number and the suffix.
_LONGEST_NAME = 200
_LONGEST = 1000

_RESERVED = re.compile(r"(CON|PRN|AUX|NUL|COM\d|LPT\d)(\..*)?", re.IGNORECASE)
_FORBIDDEN = re.compile(r'[<>:"|?*]')


def check_prefix(prefix: str, folder: Path, *, windows: bool = os.name == "nt") -> None:
    """Check the start of a file name as the user wrote it, which must stay in `folder`."""
    reason = _reason(prefix, folder, windows=windows)
    if reason:
        raise ValueError(
            f"filename_prefix is {described(prefix)}, {reason}; expected a name within the folder"
        )


def _reason(prefix: str, folder: Path, *, windows: bool) -> str | None:
    if any(ord(character) < 32 or ord(character) == 127 for character in prefix):
        return "with a control character"
    try:
        size = len(prefix.encode())
    except UnicodeEncodeError:
        return "with half a character"
    parts = PurePosixPath(prefix.replace("\\", "/") if windows else prefix).parts
    if size > _LONGEST or any(len(part.encode()) > _LONGEST_NAME for part in parts):
        return f"{size} bytes long"
    # The last part becomes a longer name, which is not reserved.
    if windows and any(_RESERVED.fullmatch(part) for part in parts[:-1]):
        return "with a name that is reserved on Windows"
    if windows and any(_FORBIDDEN.search(part) for part in parts):
        return "with a character that Windows does not allow"
    place = Path(os.path.normpath(folder / prefix))
    if place != folder and folder not in place.parents:
        return "which leads out of it"
    if any(each.is_file() for each in place.parents if folder in each.parents):
        return "with a file in place of a folder"
    return None
