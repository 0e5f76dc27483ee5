"""A user's installation from nothing: a new environment, torch, ComfyUI's requirements, the pack.

The pack comes from the published archive, in the order in which a user does it.
"""

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import torch

from ..nodes.checkout import find_comfyui

# Not the name that a clone has: a registry installs into a folder of its own choice.
FOLDER = "some-other-name"

# Packages that require torchvision would install another torch, so these are installed without
# dependencies; boot.py replaces what is missing.
_TORCH_FAMILY = {"torch", "torchvision", "torchaudio"}
_WITHOUT_DEPENDENCIES = {"spandrel", "kornia"}


def install_torch(folder: Path) -> Path:
    """Create a virtual environment in `folder` with this torch, and return its Python."""
    venv.create(folder, with_pip=True, symlinks=sys.platform != "win32")
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    _pip(python, f"torch=={torch.__version__.partition('+')[0]}")
    return python


def install_comfyui(python: Path) -> None:
    """Install ComfyUI's requirements, except the torch family."""
    lines = (find_comfyui() / "requirements.txt").read_text(encoding="utf-8").splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    bare = [line for line in requirements if _name_of(line) in _WITHOUT_DEPENDENCIES]
    apart = _TORCH_FAMILY | _WITHOUT_DEPENDENCIES
    _pip(python, *(line for line in requirements if _name_of(line) not in apart))
    if bare:
        _pip(python, "--no-deps", *bare)


def unpack(archive: Path, base: Path) -> Path:
    """Unpack the archive of `publish_zip` into ComfyUI's folders in `base`; return the pack's."""
    folder = base / "custom_nodes" / FOLDER
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    return folder


def install_pack(python: Path, folder: Path) -> None:
    """Install the requirements of the pack in `folder`."""
    _pip(python, "-r", str(folder / "requirements.txt"))


def torch_of(python: Path) -> str:
    """Return the version and build of torch that a Python has."""
    command = [str(python), "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower()


def _pip(python: Path, *arguments: str) -> None:
    """Install, or raise with what pip says."""
    command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
