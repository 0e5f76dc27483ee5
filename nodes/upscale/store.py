"""What an interrupted run leaves: its finished parts, and where it goes on.

A folder for the inputs of a run has a video file for each finished window, and a file with the
state, which is replaced when a window is finished. The name of the folder is a hash of the inputs,
so no other run continues it.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...vae import media

_logger = logging.getLogger(__name__)

FOLDER = "unfinished upscales"
_STATE = "state.safetensors"
_FORMAT = "fast-video-vae upscale 1"
# Blocks of a file that stand for all of it, evenly spread, and their bytes.
_BLOCKS, _BLOCK = 64, 1 << 14
# Numbers of a tensor that stand for all of them.
_SAMPLED = 16


@dataclasses.dataclass
class State:
    """What is done. Numbers of latents are those of a scene."""

    length: int  # latents of a window
    overlap: int  # latents that two windows share; fewer than `length`
    parts: int = 0  # finished files
    frames: int = 0  # in them
    scene: int = 0  # the first frame of the scene
    window: int = 0  # of the scene, the next one
    decoded: int = 0  # latents of the scene whose frames are in the files
    is_done: bool = False
    marks: list[list[object]] = dataclasses.field(default_factory=list)  # `file_mark` of each part
    # The last latents that are sampled, of which the last ones may change.
    latent: Tensor = dataclasses.field(default_factory=lambda: torch.empty(1, 0, 0, 0, 0))

    @property
    def step(self) -> int:
        """Latents from a window to the next one."""
        return self.length - self.overlap


class Store:
    """The folder of a run with some inputs, whose parts have a suffix."""

    def __init__(self, base: Path, inputs: dict[str, Any], suffix: str) -> None:
        self._inputs, self._suffix = json.dumps(inputs, sort_keys=True), suffix
        self.folder = base / FOLDER / hashlib.sha256(self._inputs.encode()).hexdigest()[:16]

    def parts(self, count: int) -> list[Path]:
        """Return the names of the first parts."""
        return [self.folder / f"{number:05}{self._suffix}" for number in range(count)]

    def load(self) -> State | None:
        """Return where a run goes on; None: it has not finished a window."""
        try:
            with safe_open(self.folder / _STATE, "pt") as file:
                found = file.metadata()
                if found["format"] != _FORMAT or found["inputs"] != self._inputs:
                    return None
                latent = file.get_tensor("latent").clone()  # Windows keeps an open file
                state = State(**json.loads(found["state"]), latent=latent)
        except (OSError, KeyError, TypeError, ValueError, SafetensorError):
            return None
        if [file_mark(each) for each in self.parts(state.parts) if each.is_file()] != state.marks:
            _logger.warning("Fast Video VAE: a finished part in %s has changed", self.folder)
            return None
        return state

    def create(self) -> None:
        """Make the folder, and check that files can be written there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.folder).close()

    def save(self, state: State) -> None:
        """Replace the state."""
        numbers = {k: v for k, v in vars(state).items() if k != "latent"}
        metadata = {"format": _FORMAT, "inputs": self._inputs, "state": json.dumps(numbers)}
        with media.whole_file(self.folder / _STATE, overwrite=True) as draft:
            draft.part.write_bytes(save({"latent": state.latent.contiguous()}, metadata))

    def remove(self) -> None:
        """Remove the folder of a run that has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other runs are in it
            self.folder.parent.rmdir()


def graph_mark(prompt: Mapping[str, Any] | None, node: str | None) -> str:
    """Return a hash of the nodes that the inputs of a node come from, whatever their names are."""
    if not prompt or node not in prompt:
        return ""

    @functools.cache
    def of(name: str) -> str:
        found, given = prompt[name], {}
        for key, value in found["inputs"].items():
            if isinstance(value, list) and len(value) == 2 and str(value[0]) in prompt:
                given[key] = [of(str(value[0])), value[1]]
            elif name != node:
                given[key] = value
        text = json.dumps([found["class_type"], given], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    return of(node)


def file_mark(source: object) -> list[object]:
    """Return the size of a file, by path or in memory, and a hash of blocks of it."""
    is_path = isinstance(source, (str, os.PathLike))
    found = hashlib.sha256()
    with Path(source).open("rb") if is_path else io.BytesIO(source.getvalue()) as file:
        size = file.seek(0, os.SEEK_END)
        for number in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK) * number // (_BLOCKS - 1))
            found.update(file.read(_BLOCK))
    return [size, found.hexdigest()]


def tensors_mark(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of names, shapes and a few numbers of tensors, such as weights."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        # Some weights are in a form of their own.
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // _SAMPLED)][: _SAMPLED + 1].cpu().contiguous()
            found.update(some.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
