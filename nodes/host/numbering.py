"""Names of new files by ComfyUI's numbering, `v_00001_.mp4` and so on."""

from collections.abc import Iterator
from pathlib import Path

import folder_paths

from .api import io, ui


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
