"""Make the folder that lets `bench_gpu.py` measure the peers on a machine without a network.

`python tests/benchmarks/prepare_gpu.py` copies diffusers and what it needs from the packages of
this Python, and ComfyUI's `comfy/` from its checkout, to `.gpu/`, which is not committed. A small
module stands in for comfy-kitchen, whose kernels are too large to carry. Packages that are compiled
for this version of Python, or need large libraries, are left out. Then its size is checked, and
that ComfyUI and diffusers import from it next to the usual packages of such a machine only.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks.gpu import bundle  # noqa: E402

# What the peers need and a bare machine may lack.
_PACKAGES = ("diffusers", "importlib_metadata", "zipp", "einops", "comfy_aimdo", "av")

# Of ComfyUI; whatever else its import asks for is added.
_COMFYUI = ("comfy", "comfyui_version.py", "node_helpers.py")

# Vocabularies of text encoders from this size on stay behind: 11 of the 19 MB of `comfy/`.
_TOKENIZER_BYTES = 400_000

_LIMIT_BYTES = 64 << 20

# Modules that the import may ask for, one after another.
_ROUNDS = 20

# File names of modules that were compiled for one version of Python.
_COMPILED = re.compile(r"\.(?:cpython-|cp)\d[^/]*\.(?:so|pyd)$")

_KITCHEN = '''"""Stands in for comfy-kitchen: none of its kernels is here."""


def int8_attention_is_available(*_: object) -> bool:
    return False


def flash_attention_decode_is_available(*_: object) -> bool:
    return False
'''

_MADE = "made-by-prepare_gpu"  # an empty file in the folder, which may then be replaced


def main() -> None:
    """Make the folder that the command line names, and check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=bundle.FOLDER)
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    args = parser.parse_args()
    try:
        make(args.folder, args.comfyui)
    except ValueError as error:
        sys.exit(f"error: {error}")


def make(folder: Path, comfyui: Path) -> None:
    """Make the folder and print what is in it.

    Args:
        folder: The folder; one that an earlier run has made is replaced.
        comfyui: A checkout of ComfyUI; if there is none, the folder has none.

    Raises:
        ValueError: The folder is in use, too large, or its modules do not import.
    """
    _clear(folder)
    for name in _PACKAGES:
        print(copy_package(name, folder / bundle.PACKAGES))
    if (comfyui / "comfy" / "sd.py").is_file():
        for name in _COMFYUI:
            _copy(comfyui / name, folder / bundle.COMFYUI / name)
        stub = folder / bundle.PACKAGES / "comfy_kitchen" / "__init__.py"
        stub.parent.mkdir()
        stub.write_text(_KITCHEN, encoding="utf-8")
        print(f"ComfyUI of {comfyui}: {_mib(folder / bundle.COMFYUI)}, comfy_kitchen is a stub")
    else:
        print(f"left out: ComfyUI, because {comfyui} has no comfy/sd.py; give --comfyui FOLDER")
    for line in _complete(folder, comfyui):
        print(line)
    size = _bytes(folder)
    if size > _LIMIT_BYTES:
        raise ValueError(f"{folder} has {size >> 20} MiB; expected at most {_LIMIT_BYTES >> 20}")
    print(f"{folder}: {_mib(folder)}; next: python tests/benchmarks/bench_gpu.py --bundle {folder}")


def copy_package(name: str, target: Path) -> str:
    """Copy an installed package or module to a folder, and return a line about it."""
    source = _installed(name)
    if source is None:
        return f"left out: {name}, because it is not installed here"
    libraries = source.with_name(f"{name}.libs")
    if libraries.is_dir():
        return f"left out: {name}, because it brings {_mib(libraries)} of libraries"
    compiled = sorted(path.name for path in _files(source) if _COMPILED.search(path.name))
    if compiled:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"left out: {name}, because {compiled[0]} is compiled for Python {version}"
    _copy(source, target / source.name)
    for distribution in importlib.metadata.packages_distributions().get(name, ()):
        _copy_metadata(distribution, target)
    return f"{name}: {_mib(target / source.name)}"


def _installed(name: str) -> Path | None:
    """Return the folder or file of an installed package or module."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else str(spec.origin))


def _clear(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()) and not (folder / _MADE).exists():
        raise ValueError(f"{folder} was not made by this script; expected a new or an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / bundle.PACKAGES).mkdir(parents=True)
    (folder / _MADE).touch()


def _complete(folder: Path, comfyui: Path) -> Iterator[str]:
    """Import from the folder, add the modules that are missing, and yield a line for each."""
    command = [sys.executable, str(_HERE / "gpu" / "bare_import.py"), str(folder)]
    for _ in range(_ROUNDS):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            raise ValueError(f"the check of the imports failed: {done.stderr.strip()[-300:]}")
        outcome = json.loads(lines[-1])
        if not outcome:
            yield "imports work: " + ", ".join(_imported(folder))
            return
        if "error" in outcome:
            raise ValueError(f"an import fails: {outcome['error']}")
        top = outcome["missing"].partition(".")[0]
        yield _add(top, folder, comfyui)
    raise ValueError(f"more than {_ROUNDS} modules are missing; expected a checkout of ComfyUI")


def _add(name: str, folder: Path, comfyui: Path) -> str:
    """Add a module that an import asked for.

    Raises:
        ValueError: It cannot be carried, or it was added before.
    """
    for path in (comfyui / f"{name}.py", comfyui / name):
        there = folder / bundle.COMFYUI / path.name
        if path.exists() and not there.exists():
            _copy(path, there)
            return f"{path.name} of ComfyUI: {_mib(there)}"
    there = folder / bundle.PACKAGES
    if (there / name).exists() or (there / f"{name}.py").exists():
        raise ValueError(f"a module of {name} is missing, although the package was copied")
    line = copy_package(name, there)
    if line.startswith("left out"):
        raise ValueError(f"an import needs {name}; {line}")
    return line


def _imported(folder: Path) -> list[str]:
    there = {
        "comfy.sd": folder / bundle.COMFYUI,
        "diffusers": folder / bundle.PACKAGES / "diffusers",
    }
    return [name for name, path in there.items() if path.is_dir()] or ["none is in the folder"]


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a folder, without caches and the largest vocabularies."""
    for path in _files(source):
        there = target / path.relative_to(source) if source.is_dir() else target
        is_large = path.stat().st_size >= _TOKENIZER_BYTES
        if not (is_large and path.parent.name.endswith("_tokenizer")):
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)


def _copy_metadata(distribution: str, target: Path) -> None:
    """Copy the metadata, by which packages ask for each other's versions."""
    for file in importlib.metadata.files(distribution) or ():
        if file.name == "METADATA" and file.parent.name.endswith(".dist-info"):
            _copy(Path(str(file.locate())), target / file.parent.name / file.name)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    paths = (path for path in source.rglob("*") if "__pycache__" not in path.parts)
    return sorted(path for path in paths if path.is_file())


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _mib(path: Path) -> str:
    return f"{_bytes(path) / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
