"""What the calls of a thread see: the kernels and fallbacks of a video, or a device to play.

What a video runs is fixed while it runs: the kernels found before it, and a `Fallback` in place of
what a device computes wrongly. A network that runs on `meta` plays a device: its calls of ops are
noted, and only allocate.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..backends import Kernel, within
from ..convolution.weight import ConvWeight


@dataclass(frozen=True)
class Fallback:
    """What is used on a device in place of what is wrong there; nothing by default."""

    reference: bool = False  # the ops of the reference, attention in blocks, plain convolutions
    sliced: bool = False  # convolutions of single frames in place of those over time
    contiguous: bool = False  # convolutions in contiguous memory, channels first
    float32: bool = False  # layers in float32
    cpu: bool = False

    def __bool__(self) -> bool:
        return self != _NONE

    def __or__(self, other: "Fallback") -> "Fallback":
        return Fallback(**dict.fromkeys((*self.names, *other.names), True))

    @property
    def convolves(self) -> bool:
        """Whether other convolutions run."""
        return self.reference or self.sliced or self.contiguous

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what is used, as attributes."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name))

    @property
    def words(self) -> str:
        """What is used, for people."""
        return ", ".join(_WORDS[name] for name in self.names) or "nothing else"


_WORDS = {
    "reference": "plain ops",
    "sliced": "convolutions of single frames",
    "contiguous": "contiguous convolutions",
    "float32": "float32",
    "cpu": "the CPU",
}

_NONE = Fallback()


@dataclass(frozen=True)
class Snapshot:
    """What a video sees of what is found."""

    kernels: int  # number of the last kernel; 0: the library alone
    proofs: int  # number of the last proof
    native: bool  # the C++ kernels of the CPU are loaded
    fallback: Fallback = _NONE  # in place of what is wrong


# Takes the kernel of a convolution (None: the library, or another op), an op, the arguments of its
# launches, and its result.
Note = Callable[[Kernel | None, str, Sequence[Any], Tensor], object]


@dataclass(frozen=True)
class Recorder:
    """A network that runs on `meta` plays `device`: its calls only allocate, and are noted."""

    device: torch.device
    note: Note
    tiles: bool  # the convolutions run on our kernels where they may; otherwise on the library


_snapshot: ContextVar[Snapshot | None] = ContextVar("snapshot", default=None)
_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)

# What the calls of this thread see; None: all that there is.
snapshot = _snapshot.get

# What notes the calls of this thread on `meta`; None: nothing.
recorder = _recorder.get


def fallback() -> Fallback:
    """Return what the calls of this thread use in place of what is wrong."""
    seen = snapshot()
    return _NONE if seen is None else seen.fallback


def seeing(seen: Snapshot) -> AbstractContextManager[object]:
    """Let ops in this thread run what `seen` has, until the end of the block."""
    return within(_snapshot, seen)


def device_of(x: Tensor | ConvWeight) -> torch.device:
    """Return the device of `x` `[...]`, or the one that this thread plays on `meta`."""
    made = recorder()
    return x.device if made is None else made.device


def playing(
    device: torch.device, note: Note, *, tiles: bool = False
) -> AbstractContextManager[object]:
    """Let calls of this thread on `meta` play `device` until the block ends; see `Recorder`."""
    return within(_recorder, Recorder(device, note, tiles))
