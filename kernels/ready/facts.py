"""What is known about a device, kept on disk for later processes: the one store of the pack.

One JSON file for each combination of device, driver, versions and sources. A file that cannot be
read counts as empty, and a folder that cannot be written costs only the memory of it. Processes
that write at the same time replace whole files: a fact that is lost so is found again.
"""

import ctypes
import functools
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import cache
from ..devices import amd_chip, device_kind, device_name
from ..devices.instructions import processor
from ..errors import first_line, log_once

_REPORTS = "https://github.com/fast-video-vae/ComfyUI-FastVideoVAE/issues"

# Layout of the file; another one is not read.
_FORMAT = 3

# Sources that decide whether a kernel is right, and how fast it is.
_FOLDERS = (".", "ready", "convolution", "cuda_ops", "triton_ops", "csrc/cuda")
_SUFFIXES = (".py", ".cu", ".cuh")

# Packages whose versions decide that too, under the names of their builds, and what disables some.
_PACKAGES = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm")
_SWITCHES = ("FAST_VIDEO_VAE_TRITON", "FAST_VIDEO_VAE_CUDA")

# A fact that is being found has the number of processes that have begun to, and when the last did.
# In these seconds its process may run yet.
_TRIES, _MOST_TRIES, _BUSY_S = "tries", 2, 30

_opened: dict[Path, "Facts"] = {}


class Facts:
    """Facts by name, in memory and in a file, which repeats `made_on`: device and versions."""

    def __init__(self, path: Path, made_on: Mapping[str, str]) -> None:
        self.path, self._made_on = path, dict(made_on)
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        self.read()

    def read(self) -> None:
        """Read what other processes have written, which replaces what this one has found."""
        with self._lock:
            self._known = {**self._known, **self._read()}

    def get(self, name: str) -> Any:  # noqa: ANN401, what JSON holds
        """Return what is known under `name`, a value of JSON; None: nothing."""
        return self._known.get(name)

    def named(self, start: str) -> dict[str, Any]:
        """Return the facts whose names begin with `start`."""
        return {name: value for name, value in self._known.items() if name.startswith(start)}

    def put(self, name: str, value: object) -> None:
        """Add a fact `name`, and write the file; `value` is one that JSON holds, never None."""
        with self._lock:
            self._known = {**self._read(), **self._known, name: value}
            content = {"format": _FORMAT, "made_on": self._made_on, "facts": self._known}
            cache.keep(self.path, json.dumps(content, indent=1).encode(), "checks kernels")

    def once(self, name: str, find: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:  # noqa: ANN401
        """Return what is known under `name` if it `holds`, or else what `find` returns, kept.

        None: it has ended the process twice. Once is not enough, because users end processes too,
        and what another process began a moment ago is not counted.
        """
        self.read()
        known = self.get(name)
        tries = 0 if known is None else 1
        if isinstance(known, dict) and _TRIES in known:
            tries = known[_TRIES] - (abs(time.time() - known["at"]) < _BUSY_S)
        elif known is not None and holds(known):
            return known
        if tries >= _MOST_TRIES:
            return None
        self.put(name, {_TRIES: tries + 1, "at": time.time()})
        try:
            found = find()
        except Exception:  # such as a lack of memory
            self.put(name, {_TRIES: tries, "at": 0})
            raise
        self.put(name, found)
        return found

    def _read(self) -> dict[str, Any]:
        """Return the facts of the file; nothing if it is not a file of ours."""
        try:
            if not self.path.is_file():
                return {}
            content = json.loads(self.path.read_bytes())
            if content["format"] != _FORMAT or content["made_on"] != self._made_on:
                raise ValueError("it was made elsewhere")
            return dict(content["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log_once(f"{self.path} is not readable ({first_line(error)[:80]}) and is made again")
            return {}


def _kept(made_on: Mapping[str, str]) -> Facts:
    text = json.dumps(made_on, sort_keys=True)
    path = cache.folder("facts") / f"{cache.digest(text.encode())}.json"
    if path not in _opened:
        _opened.setdefault(path, Facts(path, made_on))
    return _opened[path]


def facts_of(device: torch.device) -> Facts:
    """Return the facts about `device` that do not depend on our kernels."""
    return _kept(_environment(device))


@functools.cache
def of_kernels(device: torch.device) -> Facts:
    """Return the facts about our kernels on `device`."""
    return _kept(
        {
            **_environment(device),
            **({"processor": processor()} if device.type == "cpu" else {}),
            "cudnn": str(torch.backends.cudnn.version()),
            **{package: _version(package) for package in _PACKAGES},
            **{switch: os.environ.get(switch, "") for switch in _SWITCHES},
            "sources": sources(),
        }
    )


@functools.cache
def sources() -> str:
    """Return the hash of our kernels, which changes between releases of this package too."""
    root = Path(__file__).parents[1]
    files = (path for folder in _FOLDERS for path in sorted((root / folder).iterdir()))
    return cache.key_of((), (path for path in files if path.suffix in _SUFFIXES))


def report(device: torch.device) -> str:
    """Return the end of a line about wrong results on `device`."""
    return f"please report this line at {_REPORTS}: {environment(device)}"


def environment(device: torch.device) -> str:
    """Return the device and the versions that decide what it computes, as text to post."""
    made_on = _environment(device)
    versions = {"torch": made_on["torch"], "driver": made_on["driver"]}
    library = {"nvidia": "cuDNN", "amd": "MIOpen"}.get(device_kind(device))
    if library is not None:
        versions[library] = str(torch.backends.cudnn.version())
    versions["system"] = f"{platform.system()} {platform.machine()}"
    name = f"{made_on['device']} {made_on['capability']}".strip()
    words = (f"{each} {value}" for each, value in versions.items() if value)
    return ", ".join([name if device.type != "cpu" else processor(), *words])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _environment(device: torch.device) -> dict[str, str]:
    """Return name, chip and driver of `device`, and the version of PyTorch."""
    kind, capability = device_kind(device), ""
    if kind == "nvidia":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    elif kind == "amd":
        capability = amd_chip(device)
    return {
        "device": device_name(device),
        "capability": capability,
        "driver": _driver() if kind == "nvidia" else "",
        "torch": str(torch.__version__),
    }


@functools.cache
def _driver() -> str:
    """Return the version of NVIDIA's driver from its management library; "" without it."""
    text = ctypes.create_string_buffer(96)
    with suppress(OSError):
        name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
        library = ctypes.CDLL(name)
        library.nvmlInit_v2()
        library.nvmlSystemGetDriverVersion(text, len(text))
        library.nvmlShutdown()
    return text.value.decode(errors="replace")
