"""A network that runs on `meta`: its calls of ops are noted, and only allocate."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends import Kernel, within
from ..convolution.weight import ConvWeight

# Takes the kernel of a convolution (None: the library, or another op), an op, the arguments of its
# launches, and its result.
Note = Callable[[Kernel | None, str, Sequence[Any], Tensor], object]


@dataclass(frozen=True)
class Recorder:
    """A network that runs on `meta` plays `device`: its calls only allocate, and are noted."""

    device: torch.device
    note: Note
    tiles: bool  # the convolutions run on our kernels where they may; otherwise on the library


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recorder() -> Recorder | None:
    """Return what notes the calls of this thread on `meta`; None: nothing."""
    return _recorder.get()


def device_of(x: Tensor | ConvWeight) -> torch.device:
    """Return the device of `x` `[...]`, or the one that this thread plays on `meta`."""
    made = _recorder.get()
    return x.device if made is None else made.device


def playing(
    device: torch.device, note: Note, *, tiles: bool = False
) -> AbstractContextManager[object]:
    """Let calls of this thread on `meta` play `device` until the block ends; see `Recorder`."""
    return within(_recorder, Recorder(device, note, tiles))
