"""Import ComfyUI and diffusers from a bundle as a bare machine would: `bare_import.py FOLDER`.

Of the packages that are installed here, only those of `BARE` and what they need can be imported, so
a module that the bundle lacks is missing here too. It prints one line of JSON: `missing` is the
module that was not found, `error` any other reason, and both are absent if all imports work.
"""

import importlib.metadata
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

# Distributions that a machine for machine learning has.
BARE = (
    "torch", "torchvision", "torchaudio", "triton", "numpy", "scipy", "safetensors", "transformers",
    "sentencepiece", "huggingface_hub", "tqdm", "pyyaml", "pillow", "psutil", "requests", "einops",
    "aiohttp", "setuptools",
)  # fmt: skip

# Those that the CPU build of PyTorch has no match for; boot.py replaces them.
_BOOT = Path(__file__).resolve().parents[2] / "nodes"


def main() -> None:
    """Import from the folder of the first argument and print the outcome."""
    folder = Path(sys.argv[1]).resolve()
    sys.path[:] = [str(folder / "packages"), str(folder / "comfyui"), *sys.path[1:], str(_BOOT)]
    sys.meta_path[:] = [_Bare() if finder is PathFinder else finder for finder in sys.meta_path]
    warnings.simplefilter("ignore")
    outcome = {}
    try:
        for work in (_import_comfyui, _import_diffusers):
            for module in work(folder):
                if not Path(str(module.__file__)).is_relative_to(folder):
                    raise ImportError(f"{module.__name__} is {module.__file__}")
    except ModuleNotFoundError as error:
        outcome["missing"] = str(error.name)
    except Exception as error:  # whatever an import raises
        outcome["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(outcome))


def needed_by(names: Sequence[str]) -> set[str]:
    """Return the distributions `names` and, of the installed ones, all that they need."""
    found: set[str] = set()
    ahead = [*names]
    while ahead:
        name = _normal(ahead.pop())
        if name in found:
            continue
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        ahead += [line for line in lines if "extra ==" not in line]
    return found


def _import_comfyui(folder: Path) -> list[ModuleType]:
    if not (folder / "comfyui").is_dir():
        return []
    import boot

    boot.stand_ins()
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ldm.seedvr.vae
    import comfy.ldm.wan.vae
    import comfy.sd
    import comfyui_version

    return [comfy.sd, comfyui_version]


def _import_diffusers(folder: Path) -> list[ModuleType]:
    if not (folder / "packages" / "diffusers").is_dir():
        return []
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    return [sys.modules["diffusers"], sys.modules[AutoencoderKLWan.__module__]]


def _normal(line: str) -> str:
    """Return the normalised name at the start of a requirement."""
    match = re.match(r"[\w.-]+", line)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else line


class _Bare(PathFinder):
    """Finds modules on `sys.path`, except those of distributions that a bare machine lacks."""

    def __init__(self) -> None:
        self._there = needed_by(BARE)
        self._homes = importlib.metadata.packages_distributions()
        self._bundle = tuple(sys.path[:2])

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or path is not None:
            return spec
        # A package without `__init__.py` has no origin.
        places = [str(spec.origin), *(spec.submodule_search_locations or ())]
        if any(place.startswith(self._bundle) for place in places):
            return spec
        homes = {_normal(home) for home in self._homes.get(name, ())}
        return spec if not homes or homes & self._there else None


if __name__ == "__main__":
    main()
