"""Times of the convolutions' candidates, kept on disk for later processes.

One JSON file for each combination of device, versions and switches; see `environment`. A file that
cannot be read counts as empty, and a folder that cannot be written costs only the memory of it.
"""

import functools
import hashlib
import json
import logging
import math
import os
import re
import threading
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import cache
from ..backends import CONVOLUTIONS
from ..errors import Refusal, first_line, log_once
from ..probes.environment import of_device
from ..triton_ops import runtime
from . import kitchen

_logger = logging.getLogger(__name__)

# Layout of the file; another one is not read.
_FORMAT = 2

# A file with all shapes of all families has about 50 KB; a larger one is not ours.
_MOST_BYTES = 4 << 20

# Sources that decide the result of a trial.
_FOLDERS = ("convolution", "triton_ops")

# Packages whose kernels are tried, under the names of their builds.
_PACKAGES = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "comfy-kitchen")

# Environment variables that decide which candidates can run.
_SWITCHES = ("FAST_VIDEO_VAE_TRITON", "TRITON_INTERPRET")

# Names of candidates in a file.
_NAMES = re.compile("|".join((*CONVOLUTIONS, "triton:[0-9]+")))

# Another process writes a file in milliseconds.
_WAIT_S = 2.0

# Seconds of the candidates of a shape class by name; None: the candidate does not serve, or cannot
# be the fastest.
Times = dict[str, float | None]

_lock = threading.Lock()
_opened: dict[torch.device, "TrialStore"] = {}


class TrialStore:
    """Results of trials on one device, in memory and on disk.

    Another process can write the file at the same time, so only what this process has measured is
    added to what the file holds when it is written.

    Args:
        path: Path of the file.
        made_on: Description of device and versions, which the file repeats.
    """

    def __init__(self, path: Path, made_on: Mapping[str, str]) -> None:
        self.path, self._made_on = path, dict(made_on)
        self._lock = threading.Lock()
        self._own: dict[str, Times] = {}
        self._facts: dict[str, bool] = {}
        self._known, self._known_facts = self._read()

    def times(self, shape: str) -> Times:
        """Return the seconds by candidate for the class `shape`; None: it does not serve."""
        return {**self._known.get(shape, {}), **self._own.get(shape, {})}

    def put(self, shape: str, candidate: str, seconds: float | None) -> None:
        """Add the result of a trial, and write the file.

        Args:
            shape: Shape class.
            candidate: Name of the candidate.
            seconds: Seconds of a call; None: it does not serve.
        """
        self._own.setdefault(shape, {})[candidate] = seconds
        self._write()

    def drop(self, shape: str, candidate: str) -> None:
        """Forget the result of `candidate` for the class `shape`."""
        for known in (self._own, self._known):
            known.get(shape, {}).pop(candidate, None)
        self._write(dropped=(shape, candidate))

    def fact(self, name: str) -> bool | None:
        """Return what is known about the device under `name`; None: nothing."""
        return self._facts.get(name, self._known_facts.get(name))

    def put_fact(self, name: str, *, value: bool) -> None:
        """Add a `value` under `name`, and write the file."""
        self._facts[name] = value
        self._write()

    def _read(self) -> tuple[dict[str, Times], dict[str, bool]]:
        """Return the times and facts of the file; nothing if it is not a file of ours."""
        try:
            if self.path.stat().st_size > _MOST_BYTES:
                raise ValueError("it is too large")
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT or content["made_on"] != self._made_on:
                raise ValueError("it was made elsewhere")
            shapes, facts = content["shapes"], content["facts"]
            times = {str(shape): _times(each) for shape, each in shapes.items()}
            return times, {str(k): v for k, v in facts.items() if isinstance(v, bool)}
        except FileNotFoundError:
            return {}, {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = first_line(error)[:80]
            log_once(f"{self.path} is not readable ({reason}); convolutions are timed again")
            return {}, {}

    def _write(self, dropped: tuple[str, str] | None = None) -> None:
        with self._lock, cache.alone(self.path, _WAIT_S):
            written, facts = self._read()
            if dropped is not None:
                written.get(dropped[0], {}).pop(dropped[1], None)
            for shapes in (written, self._own):
                for shape, times in shapes.items():
                    self._known.setdefault(shape, {}).update(times)
            self._known_facts |= facts | self._facts
            content = {
                "format": _FORMAT,
                "made_on": self._made_on,
                "shapes": self._known,
                "facts": self._known_facts,
            }
            try:
                cache.replace(self.path, json.dumps(content, indent=1).encode())
            except OSError as error:
                log_once(
                    f"{self.path.parent} is not writable ({error.strerror}), so every start times "
                    "convolutions again; set FAST_VIDEO_VAE_CACHE to a writable folder"
                )


def opened(device: torch.device) -> TrialStore:
    """Return the store of `device`, which is read at the first call."""
    store = _opened.get(device)
    if store is None:
        with _lock:
            store = _opened.get(device)
            if store is None:
                made_on = environment(device)
                path = cache.path_for("convolutions", made_on)
                store = _opened[device] = TrialStore(path, made_on)
    return store


def environment(device: torch.device) -> dict[str, str]:
    """Return all that decides the result of a trial on `device`, by name."""
    return {
        **of_device(device),
        "cudnn": str(torch.backends.cudnn.version()),
        **{package: _version(package) for package in _PACKAGES},
        **{switch: os.environ.get(switch, "") for switch in _SWITCHES},
        # A compiler or a library that is installed later changes these.
        "triton runs": _runs_triton(device),
        "kitchen runs": str(not isinstance(kitchen.installed(), str)),
        "sources": sources(),
    }


def _runs_triton(device: torch.device) -> str:
    """Return whether Triton compiles and runs a kernel."""
    try:
        runtime.refuse_device(device, torch.float16)
        runtime.require(device)
    except Refusal:
        return "False"
    return "True"


@functools.cache
def sources() -> str:
    """Return the hash of our candidates, which changes between releases of this package too."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for folder in _FOLDERS:
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _times(content: Mapping[Any, Any]) -> Times:
    """Return the entries of a file's shape class that are times or None of known candidates."""
    return {
        str(name): None if value is None else float(value)
        for name, value in content.items()
        if _NAMES.fullmatch(str(name))
        and (value is None or (isinstance(value, float) and math.isfinite(value) and value > 0))
    }
