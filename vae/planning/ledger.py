"""The memory of a stream that runs without its data, by the rules of `Workspace` and PyTorch."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from ..layers.workspace import KEPT_BYTES, WASTE
from .layer_specs import Shape

# Added to the peak of a stream with a tensor that the device cannot hold: more than every limit.
TOO_MUCH_BYTES = 1 << 60


@dataclass(frozen=True)
class Setting:
    """Conditions of a stream."""

    batch: int  # videos
    itemsize: int
    single_frame: bool
    on_cpu: bool  # where large results are written to reused memory
    fused: bool  # convolutions add to an existing buffer (oneDNN)
    casts: bool  # the weights have another dtype than the activations
    tensor_bytes: int = sys.maxsize  # most of a tensor on the device


class Block:
    """Allocated memory, until no variable refers to it."""

    __slots__ = ("_give_back", "_nbytes")

    def __init__(self, nbytes: int, give_back: Callable[[int], object]) -> None:
        self._nbytes, self._give_back = nbytes, give_back

    def __del__(self) -> None:
        self._give_back(self._nbytes)


class Ledger:
    """The allocated memory, and its maximum so far; `kept_bytes` are always allocated."""

    def __init__(self, setting: Setting, kept_bytes: int) -> None:
        self.peak = self._live = kept_bytes
        self.excess = 0
        self._setting = setting
        self._unit = setting.batch * setting.itemsize
        self._scratch = 0
        self._free: list[int] = []  # sizes of the blocks that `Workspace.reused` can return again

    def take(self, nbytes: int) -> None:
        """Record an allocation of `nbytes`; a negative number is a release."""
        self._live += nbytes
        if self._live > self.peak:
            self.peak = self._live

    def nbytes(self, shape: Shape) -> int:
        """Return the bytes of an activation of `shape`, and note one that is too large."""
        channels, frames, height, width = shape
        nbytes = channels * frames * height * width * self._unit
        if nbytes > self._setting.tensor_bytes:
            self.excess = TOO_MUCH_BYTES
        return nbytes

    def new(self, shape: Shape, count: int = 1) -> Block:
        """Allocate `count` activations of `shape`."""
        nbytes = count * self.nbytes(shape)
        self.take(nbytes)
        return Block(-nbytes, self.take)

    def result(self, shape: Shape) -> Block:
        """Allocate an activation of `shape` as `Workspace.reused` does, or new memory."""
        nbytes = self.nbytes(shape)
        if not self._setting.on_cpu or nbytes < KEPT_BYTES:
            return self.new(shape)
        size = min((size for size in self._free if nbytes <= size <= WASTE * nbytes), default=0)
        if size:
            self._free.remove(size)
        else:
            self.take(nbytes - sum(self._free))
            self._free.clear()
        return Block(size or nbytes, self._free.append)

    def scratch(self, shape: Shape) -> None:
        """Allocate memory for `shape` as `Workspace.scratch` does."""
        nbytes = self.nbytes(shape)
        if nbytes > self._scratch:
            self.take(nbytes - self._scratch)
            self._scratch = nbytes
