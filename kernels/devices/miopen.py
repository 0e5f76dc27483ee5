"""Convolutions of MIOpen without its search.

AMD's library looks for an algorithm at the first call of each shape. PyTorch's `benchmark` makes it
time all of them, minutes for a decode (ROCm/TheRock#2591); without it, MIOpen compiles and times
some. In its immediate mode, of newer versions of PyTorch, it takes the best one that it knows.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .kinds import searches_shapes

# The switches are global: the first thread sets them, the last one restores them.
_lock = threading.Lock()
_holders = 0
_before: list[tuple[Any, str, bool]] = []


@contextmanager
def unsearched(device: torch.device) -> Iterator[None]:
    """Let the library of `device` search nothing within the block."""
    if not searches_shapes(device):
        yield
        return
    global _holders
    with _lock:
        if _holders == 0:
            _before.extend(_switched_off())
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            while _holders == 0 and _before:
                owner, name, value = _before.pop()
                setattr(owner, name, value)


def always_searches(device: torch.device) -> bool:
    """Return whether the library of `device` searches at each new shape, whatever is switched."""
    immediate = hasattr(getattr(torch.backends, "miopen", None), "immediate")
    fast = os.environ.get("MIOPEN_FIND_MODE", "").upper() in ("2", "FAST")
    return searches_shapes(device) and not (immediate or fast)


def _switched_off() -> Iterator[tuple[Any, str, bool]]:
    """Switch the search off, and yield the switches with their values before."""
    backends: Any = torch.backends
    names = ("cudnn", "benchmark", False), ("miopen", "immediate", True)
    for owner, name, value in names:
        if (found := getattr(backends, owner, None)) is not None:
            yield found, name, getattr(found, name)
            setattr(found, name, value)
