"""The files of tiny decoders of Wan in ComfyUI's models/vae_approx."""

import re
from pathlib import Path

import folder_paths

_FOLDER = "vae_approx"

# Names of the files by channels of the latent, the preferred one first: those of LightX2V are
# trained further, and ComfyUI's own preview looks for them.
_NAMES = {16: ("lighttaew2_1", "taew2_1"), 48: ("lighttaew2_2", "taew2_2")}

# The wider decoders of taehv, such as taew2_2_super, have another layout.
_WIDER = re.compile(r"super|wide")


def tiny_files() -> list[str]:
    """Return the names of all files."""
    prefixes = tuple(prefix for names in _NAMES.values() for prefix in names)
    return [name for name in folder_paths.get_filename_list(_FOLDER) if _fits(name, prefixes)]


def tiny_file(channels: int) -> str | None:
    """Return the name of the preferred file for a latent of `channels`, or None."""
    for prefix in _NAMES.get(channels, ()):
        for name in folder_paths.get_filename_list(_FOLDER):
            if _fits(name, prefix):
                return name
    return None


def path_of(name: str) -> Path:
    """Return the path of the file `name`."""
    return Path(folder_paths.get_full_path_or_raise(_FOLDER, name))


def _fits(name: str, prefixes: str | tuple[str, ...]) -> bool:
    stem = name.replace("\\", "/").rpartition("/")[2].lower()
    return stem.startswith(prefixes) and not _WIDER.search(stem)
