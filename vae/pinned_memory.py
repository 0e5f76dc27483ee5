"""Memory on the host that a GPU copies to and from while it computes.

PyTorch rounds each pinned allocation up to a power of two, which can double it. So slabs of such
sizes are allocated, and tensors are placed in them. Where the system refuses to pin memory, plain
memory is used, and copies block.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import log_once

# A slab is at least this part of the memory before it, so that tensors of more than half of a power
# of two share later slabs.
_GROWTH = 4

# Alignment of tensors, as of PyTorch's own allocations.
_ALIGNMENT = 256

# Most characters of an error in the log.
_REASON_LENGTH = 80


@dataclass
class _Slab:
    memory: Tensor
    used: int = 0


class PinnedMemory:
    """Memory for some tensors, which is freed together."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned  # All memory so far is pinned
        self._slabs: list[_Slab] = []

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Make room for `tensors`, each `[...]`, which share slabs then."""
        wanted = sum(map(_taken, tensors))
        if wanted > sum(len(slab.memory) - slab.used for slab in self._slabs):
            self._new_slab(wanted)

    def like(self, x: Tensor) -> Tensor:
        """Return uninitialised memory on the host with the shape, strides and dtype of `x`."""
        taken = _taken(x)
        slab = next((slab for slab in self._slabs if slab.used + taken <= len(slab.memory)), None)
        if slab is None:
            slab = self._new_slab(taken)
        flat = slab.memory[slab.used : slab.used + x.nbytes].view(x.dtype)
        slab.used += taken
        return flat.as_strided(x.shape, torch.empty_like(x, device="meta").stride())

    def _new_slab(self, nbytes: int) -> _Slab:
        """Allocate a slab of at least `nbytes`."""
        held = sum(len(slab.memory) for slab in self._slabs)
        wanted = max(nbytes, held // _GROWTH, 1)
        slab = _Slab(self._allocated(1 << (wanted - 1).bit_length()))
        self._slabs.append(slab)
        return slab

    def _allocated(self, nbytes: int) -> Tensor:
        memory = pinned_memory(nbytes) if self.pinned else None
        if memory is None:
            self.pinned = False
            return torch.empty(nbytes, dtype=torch.uint8)
        return memory


def pinned_memory(nbytes: int) -> Tensor | None:
    """Return uninitialised pinned memory `[nbytes]`, uint8, or None, noted once, if refused."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0][:_REASON_LENGTH]
        log_once(
            f"memory cannot be pinned ({reason}), so copies to and from the GPU are slower; "
            "free memory, or raise the limit of locked memory"
        )
        return None


def _taken(x: Tensor) -> int:
    """Return the bytes of `x` `[...]` with its alignment."""
    return -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
