"""The ComfyUI of the tests: its folder, its requirements, and its modules."""

import importlib
import logging
import os
import re
import sys
import warnings
from importlib.metadata import distributions
from pathlib import Path

from . import boot

PACK = Path(__file__).absolute().parents[2]

# Packages that boot.py replaces.
_REPLACED = {"torchvision", "torchaudio"}


def find_comfyui() -> Path | None:
    """Return the checkout: `$COMFYUI_PATH`, else the one with this pack, else `~/ComfyUI`."""
    found = (each for each in _places() if (each / "comfy/ldm/wan/vae.py").is_file())
    return next((place.resolve() for place in found), None)


def where_looked() -> str:
    """Return the folders of `find_comfyui`, to explain why a test was skipped."""
    places = " or ".join(map(str, _places()))
    return f"no ComfyUI checkout in {places} ($COMFYUI_PATH is asked first)"


def why_unavailable() -> str | None:
    """Return why ComfyUI does not start with this Python and torch, or None."""
    root = find_comfyui()
    if root is None:
        return where_looked()
    text = (root / "requirements.txt").read_text(encoding="utf-8")
    names = {*re.findall(r"^[A-Za-z0-9][\w.-]*", text, re.MULTILINE)} - _REPLACED
    missing = ", ".join(sorted(name for name in names if not [*distributions(name=name)]))
    return (
        f"ComfyUI in {root} needs packages that are not installed: {missing}" if missing else None
    )


def import_comfyui(base: Path) -> None:
    """Make ComfyUI's modules importable, on the CPU if there is no CUDA, with its files in `base`.

    Its folder is appended to `sys.path`, because it has its own `utils` and `tests`.
    """
    import torch

    boot.stand_ins()
    logger = logging.getLogger()
    root, handlers = str(find_comfyui()), [*logger.handlers]
    path = [*sys.path, *([root] if root not in sys.path else [])]
    # Our `nodes/` hides ComfyUI's `nodes.py` where Python was started in our folder.
    sys.path[:] = [entry for entry in path if Path(entry).resolve() != PACK.resolve()]
    if PACK.name == "nodes":  # pytest gives the root's `__init__.py` the name of the folder
        sys.modules.pop("nodes", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of ComfyUI's packages
            from comfy.cli_args import args

            args.cpu = args.cpu or not torch.cuda.is_available()
            args.base_directory = str(base)
            for name in ("comfy_api.latest", "comfy_extras", "folder_paths", "nodes"):
                importlib.import_module(name)
    finally:
        sys.path[:] = path  # nodes.py puts ComfyUI/comfy first
        logger.handlers[:] = handlers


def _places() -> list[Path]:
    given = os.environ.get("COMFYUI_PATH")
    return [Path(given)] if given else [PACK.parents[1], Path.home() / "ComfyUI"]
