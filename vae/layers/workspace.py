"""The memory that the activations of a stream are made in: lent, and used again."""

import functools
from collections.abc import Callable
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from .oom import Relief

_Result = TypeVar("_Result")

# Blocks from this size on are kept for the next result. glibc maps blocks over 32 MB afresh each
# time, and the first touch of 50 MB of fresh pages takes 13-30 ms, as long as the convolution that
# fills them takes on a CPU with AMX; smaller ones it hands out again by itself.
KEPT_BYTES = 32 << 20

# A block that is larger than this many times what is asked for stays free for something else.
WASTE = 1.5


class Workspace:
    """Memory for what layers make and soon let go of; one for all the tiles of a stream.

    Attributes:
        relief: Makes room when memory runs out; None: nobody does.
    """

    def __init__(self) -> None:
        self.relief: Relief | None = None
        self._scratch: Tensor | None = None
        self._blocks: list[Tensor] = []

    def scratch(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Lend a channels-last buffer, valid until the next call.

        It is one memory for all: fresh pages would cost as much as the arithmetic. It is
        uninitialised, of the dtype and on the device of `like`; under autograd a tensor of its own.
        """
        if torch.is_grad_enabled():
            # A view, which decides in what order autograd adds up what comes back through it.
            batch, channels, frames, height, width = shape
            return like.new_empty((batch, frames, height, width, channels)).movedim(-1, 1)
        nbytes = prod(shape) * like.element_size()
        block = self._scratch
        if block is None or block.numel() < nbytes or block.device != like.device:
            del block
            self._scratch = None  # given back before the larger one is asked for
            block = self._scratch = self.attempt(lambda: self.allocate(nbytes, like.device))
        return _video_of(block, shape, like)

    def reused(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor | None:
        """Lend channels-last memory as `scratch`; None where a fresh tensor costs no more.

        The memory comes back by itself when the last tensor on it is gone.
        """
        nbytes = prod(shape) * like.element_size()
        kept = like.device.type == "cpu" and nbytes >= KEPT_BYTES
        if not kept or torch.is_grad_enabled() or _count_alone() is None:
            return None
        free = [block for block in self._blocks if _users(block) == 1]
        fitting = [block for block in free if nbytes <= block.numel() <= WASTE * nbytes]
        if not fitting:
            # What is free and of another size belongs to layers that are done.
            self._blocks = [b for b in self._blocks if not any(b is other for other in free)]
            del free
            fitting = [self.attempt(lambda: self.allocate(nbytes, like.device))]
            self._blocks += fitting
        return _video_of(min(fitting, key=Tensor.numel), shape, like)

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """New bytes, uninitialised."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def attempt(self, do: Callable[[], _Result]) -> _Result:
        """Do something that changes nothing before it succeeds; see `Relief.attempt`."""
        return do() if self.relief is None else self.relief.attempt(do)

    def release(self) -> None:
        """Let go of all memory that nobody stands on."""
        self._scratch = None
        self._blocks = []


def _users(block: Tensor) -> int | None:
    """How many tensors stand on the memory of a block, itself included; None: nobody knows.

    PyTorch's CUDA graphs ask the same way. It is no public function, so what it says of a block
    that is known is looked at first.
    """
    alone = _count_alone()
    return None if alone is None else _count(block) - alone + 1


@functools.cache
def _count_alone() -> int | None:
    """What the storage of a tensor that nothing else stands on counts."""
    if not hasattr(torch._C, "_storage_Use_Count"):
        return None
    block = torch.empty(2)
    alone = _count(block)
    view = block[:1]
    with_view = _count(block)
    del view
    return alone if (with_view, _count(block)) == (alone + 1, alone) else None


def _count(block: Tensor) -> int:
    return torch._C._storage_Use_Count(block.untyped_storage()._cdata)


def _video_of(block: Tensor, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
    """View bytes as a channels-last `[B, C, T, H, W]`."""
    batch, channels, frames, height, width = shape
    pool = block[: prod(shape) * like.element_size()].view(like.dtype)
    return pool.view(batch, frames, height, width, channels).permute(0, 4, 1, 2, 3)


def to_unit(frames: Tensor) -> Tensor:
    """uint8 in 0-255 to float32 in [-1, 1]."""
    return frames.float().div_(127.5).sub_(1)


def canonical(x: Tensor) -> Tensor:
    """Give a channels-last tensor the strides of that format in its dimensions of size one too.

    PyTorch leaves those as they were, and with one frame or one column it then takes the tensor for
    another layout.
    """
    _, channels, frames, height, width = x.shape
    frame = channels * height * width
    return x.as_strided(x.shape, (frames * frame, 1, frame, channels * width, channels))
