"""Reused memory for the activations of a stream."""

import functools
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ...kernels import has_own_memory, zero_of

# Blocks from this size on are kept for later results. glibc maps blocks over 32 MB anew each time,
# and the first touch of 50 MB of new pages takes 13-30 ms, as long as the convolution that fills
# them on a CPU with AMX. glibc reuses smaller blocks itself.
KEPT_BYTES = 32 << 20

# A block larger than this many times the requested size is not used for it.
WASTE = 1.5


class Workspace:
    """Memory for short-lived activations; one for all tiles of a stream."""

    def __init__(self) -> None:
        self._scratch: Tensor | None = None
        self._views: dict[object, Tensor] = {}  # of the scratch memory
        self._blocks: list[Tensor] = []

    def scratch(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Return a channels-last buffer that is valid until the next call.

        All calls share one memory, because new pages would cost as much as the arithmetic.
        """
        key = tuple(shape), like.dtype, like.device
        view = self._views.get(key)
        if view is not None:
            return view
        nbytes = prod(shape) * like.element_size()
        block = self._scratch
        if block is None or block.numel() < nbytes or block.device != like.device:
            del block
            self._scratch, self._views = None, {}  # freed before the larger one is allocated
            block = self._scratch = _allocated(nbytes, like.device)
        return self._views.setdefault(key, _video_of(block, shape, like))

    def clear(self) -> None:
        """Free the memory that no tensor uses."""
        self._scratch, self._views, self._blocks = None, {}, []

    def reused(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor | None:
        """Return channels-last memory that is reused, or None where a new tensor costs no more.

        The memory becomes free when the last tensor that uses it is gone.
        """
        nbytes = prod(shape) * like.element_size()
        kept = nbytes >= KEPT_BYTES and not (like.is_meta or has_own_memory(like.device))
        if not kept or _count_alone() is None:
            return None
        free = [block for block in self._blocks if _users(block) == 1]
        fitting = [block for block in free if nbytes <= block.numel() <= WASTE * nbytes]
        if not fitting:
            # Free blocks of another size belong to layers that are done.
            self._blocks = [b for b in self._blocks if not any(b is other for other in free)]
            del free
            fitting = [_allocated(nbytes, like.device)]
            self._blocks += fitting
        return _video_of(min(fitting, key=Tensor.numel), shape, like)


def _allocated(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _users(block: Tensor) -> int | None:
    """Return the number of tensors that use the memory of `block`, itself included; None: unknown.

    PyTorch's CUDA graphs count the same way. The function is not public, so it is tested on a known
    block first.
    """
    alone = _count_alone()
    return None if alone is None else _count(block) - alone + 1


@functools.cache
def _count_alone() -> int | None:
    """Return the use count of the storage of one tensor, or None if counting does not work."""
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
    numbers = block[: prod(shape) * like.element_size()].view(like.dtype)
    return numbers.as_strided(shape, _strides(shape))


def _strides(shape: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
    """Return the strides of channels-last memory for a video `[B, C, T, H, W]`."""
    _, channels, frames, height, width = shape
    frame = channels * height * width
    return frames * frame, 1, frame, channels * width, channels


def uint16_as_int16(frames: Tensor) -> Tensor:
    """Return frames in a dtype that every device has.

    PyTorch copies, compares and computes int16 on every device, but uint16 on few: Apple GPUs have
    none before PyTorch 2.9.
    """
    return frames.view(torch.int16) if frames.dtype == torch.uint16 else frames


def to_unit(frames: Tensor) -> Tensor:
    """Convert uint8, or int16 with the bits of uint16, to float32 in [-1, 1]."""
    if frames.dtype == torch.uint8:
        return frames.float().div_(127.5).sub_(1)
    # With the highest bit flipped the value of int16 is that of uint16 less 32768.
    return frames.bitwise_xor(-0x8000).float().add_(0.5).div_(32767.5)


def canonical(x: Tensor) -> Tensor:
    """Give a channels-last `x` `[B, C, T, H, W]` the strides of that format in every dimension.

    PyTorch keeps arbitrary strides in dimensions of size one, and then misjudges the layout of a
    tensor with one frame or one column.
    """
    return x.as_strided(x.shape, _strides(x.shape))


class Handover:
    """A tensor that the receiver may free, because the giver keeps no reference to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def take(self) -> Tensor:
        """Return the tensor `[B, C, T, H, W]`, once."""
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            raise RuntimeError("the tensor was taken before; expected one receiver")
        return tensor


def within(frames: Tensor, border: int) -> Tensor:
    """Return `frames` `[B, C, T, H, W]` without their `border`."""
    return frames[..., border:-border, border:-border] if border else frames


def bordered(shape: tuple[int, ...] | torch.Size, border: int) -> tuple[int, ...]:
    """Return the `shape` `[B, C, T, H, W]` of frames with a `border` on each side."""
    *outer, height, width = shape
    return *outer, height + 2 * border, width + 2 * border


class Fill(Protocol):
    """An elementwise op or norm that writes its result into a given buffer."""

    def __call__(
        self, x: Tensor, *, out: Tensor, tail: Tensor | None = None, border: int = 0
    ) -> object:
        """Write the result for `x` into `out`, larger by `border` rows and columns of zeros a side.

        The frames of `tail` go in front of it; afterwards it holds the last frames of `out`.
        """


def copied(x: Tensor, *, out: Tensor, tail: Tensor | None = None, border: int = 0) -> None:
    """Copy frames, as a `Fill`."""
    inner = within(out, border)
    known = 0 if tail is None else tail.shape[2]
    if border:
        out.fill_(zero_of(out.dtype))
    if x.shape[2]:
        inner[:, :, known:] = x
    if tail is not None:
        inner[:, :, :known] = tail
        tail.copy_(inner[:, :, inner.shape[2] - known :])
