"""Names of new files: their check, and ComfyUI's numbering, `v_00001_.mp4` and so on."""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import folder_paths

from .api import io, ui
from .error_text import described

# Bytes of a file name that all systems support, without the number and the suffix.
_LONGEST_NAME, _LONGEST = 200, 1000
_RESERVED = re.compile(r"(CON|PRN|AUX|NUL|COM\d|LPT\d)(\..*)?", re.IGNORECASE)
_FORBIDDEN = re.compile(r'[<>:"|?*]')


def unused_names(
    prefix: str, kind: io.FolderType, suffix: str, height: int, width: int
) -> Iterator[Path]:
    """Yield names in one of ComfyUI's folders, each unused when it is asked for."""
    directory = folder_paths.get_directory_by_type(kind.value)
    number = 0
    while True:
        try:
            folder, name, counter, *_ = folder_paths.get_save_image_path(
                prefix, directory, width, height
            )
        except OSError:
            raise
        except Exception as error:  # ComfyUI's error has no class of its own
            raise ValueError(
                f"filename_prefix is {prefix!r}; expected a name within the folder"
            ) from error
        # Another server can take a name at any time, and some disks ignore the case of letters.
        number = max(number + 1, counter)
        yield Path(folder) / f"{name}_{number:05}_{suffix}"


def saved(path: Path, kind: io.FolderType) -> ui.SavedResult:
    """Return the entry for the frontend of a file in one of ComfyUI's folders."""
    below = path.parent.relative_to(folder_paths.get_directory_by_type(kind.value))
    return ui.SavedResult(path.name, "/".join(below.parts), kind)


def check_prefix(prefix: str, folder: Path, *, windows: bool = os.name == "nt") -> None:
    """Check the start of a file name as the user wrote it, which must stay in `folder`."""
    parts = PurePosixPath(prefix.replace("\\", "/") if windows else prefix).parts
    place = Path(os.path.normpath(folder / prefix.replace("\0", "")))
    sizes = [len(part.encode("utf-8", "replace")) for part in (prefix, *parts)]
    wrong = {
        "with a control character": any(ord(c) < 32 or ord(c) == 127 for c in prefix),
        "with half a character": any("\ud800" <= c <= "\udfff" for c in prefix),
        f"{sizes[0]} bytes long": sizes[0] > _LONGEST or max(sizes[1:], default=0) > _LONGEST_NAME,
        # The last part becomes a longer name, which is not reserved.
        "with a name that is reserved on Windows": windows
        and any(map(_RESERVED.fullmatch, parts[:-1])),
        "with a character that Windows does not allow": windows
        and any(map(_FORBIDDEN.search, parts)),
        "which leads out of it": place != folder and folder not in place.parents,
    }
    found = [reason for reason, is_wrong in wrong.items() if is_wrong]
    if not found and any(each.is_file() for each in place.parents if folder in each.parents):
        found = ["with a file in place of a folder"]
    if found:
        raise ValueError(
            f"filename_prefix is {described(prefix)}, {found[0]}; expected a name within the folder"
        )
