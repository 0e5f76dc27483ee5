"""Start ComfyUI even if packages around torch are missing: `boot.py FOLDER ARGUMENTS...`.

ComfyUI imports torchvision and torchaudio at its start, which the CPU build of torch has no builds
of, and kornia_rs, which an installation without dependencies lacks. A module that does not import
is replaced by an empty one: every name can be imported from it, and calling one raises. This file
needs only the standard library.
"""

import functools
import runpy
import subprocess
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGES = ("torchvision", "torchaudio", "kornia_rs")


@functools.cache
def stand_ins() -> None:
    """Let ComfyUI be imported in this process without these packages."""
    sys.meta_path.insert(0, _Finder([name for name in _PACKAGES if not _imports(name)]))


class _Finder(MetaPathFinder, Loader):
    """Answers for whole packages, whatever the submodule."""

    def __init__(self, packages):
        self._packages = packages

    def find_spec(self, name, path=None, target=None):
        ours = name.partition(".")[0] in self._packages
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec):
        return _Missing(spec.name)

    def exec_module(self, module):
        module.__version__ = "0.0.0"  # transformers asks for it


class _Missing(ModuleType):
    """A module, or a name that can be imported and looked into, and no more."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} does not import in this environment")


def _imports(name: str) -> bool:
    """Whether a package works; in another process, because a failed import leaves its traces."""
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    stand_ins()
    sys.path[0] = str(folder)  # as with `python main.py`
    sys.argv = [str(folder / "main.py"), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
