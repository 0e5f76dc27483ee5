"""The folder that `prepare_gpu.py` makes: packages and ComfyUI for a machine without a network."""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / ".gpu"

PACKAGES = "packages"  # in the folder, for `sys.path`
COMFYUI = "comfyui"  # in the folder, as a checkout


def use(folder: Path) -> None:
    """Make the bundle importable where it exists; installed packages and `COMFYUI_PATH` win."""
    if (folder / PACKAGES).is_dir():
        sys.path.append(str(folder / PACKAGES))
    if (folder / COMFYUI).is_dir():
        os.environ.setdefault("COMFYUI_PATH", str(folder / COMFYUI))
