"""The place of a bank's pairs when a layer needs them.

They are on the device of the computation if there is room; pairs take about a hundredth of the
model. Otherwise the bank is on the host, pinned if possible, and the pairs of a block are fetched
while the block before it runs, into one of two buffers. Other functions fetch their own tensors.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .bank import Bank, BankBlock, BankLayer
from .keys import Target


class BankLoader:
    """Provides the pairs of a bank's layers on a device; `staged`: block by block, always."""

    def __init__(self, bank: Bank, device: torch.device, *, staged: bool = False) -> None:
        # Blocks that had arrived when they were needed, and blocks that were waited for.
        self.hits = self.misses = self.fetched_bytes = 0
        self._bank, self._device = bank, device
        self.is_here = bank.flat.device == device and not staged
        self._blocks: list[BankBlock] = []
        self._buffers: list[_Buffer] = []
        self._block_of: dict[Target, int] = {}
        self._stream: torch.cuda.Stream | None = None
        if not self.is_here:
            self._stage()

    def pairs(self, layer: BankLayer) -> tuple[Tensor, Tensor]:
        """Return `down` `[rank, in]`, `up` `[out, rank]` of `layer`, valid until the next block."""
        if self.is_here:
            return layer.pairs(self._bank.flat)
        buffer = self._buffer_of(layer)
        return layer.pairs(buffer.pairs, self._blocks[buffer.index].pairs[0])

    def _stage(self) -> None:
        bank, device = self._bank, self._device
        self._blocks = bank.blocks()
        self._block_of = {
            layer.target: index
            for index, block in enumerate(self._blocks)
            for layer in block.layers
        }
        if self._blocks:
            size = max(last - first for _, (first, last) in self._blocks)
            flat = bank.flat.detach()
            with torch.inference_mode(False):  # another thread can write them without that mode
                self._buffers = [_Buffer(flat.new_empty(size, device=device)) for _ in range(2)]
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        # In place: pinned once for all runs, without a second copy on the host.
        for value in bank.parameters():
            value.data = _pinned(value.data)

    def _buffer_of(self, layer: BankLayer) -> "_Buffer":
        """Return the buffer with the block of `layer`, and fetch the next block."""
        index = self._block_of[layer.target]
        buffer = next((each for each in self._buffers if each.index == index), None)
        if buffer is None:
            self.misses += 1
            buffer = min(self._buffers, key=lambda each: each.used)
            self._fetch(buffer, index)
        elif not buffer.used:
            self.hits += 1
        if not buffer.used:
            if buffer.ready is not None:
                torch.cuda.current_stream(self._device).wait_event(buffer.ready)
            buffer.used = True
            other = next(each for each in self._buffers if each is not buffer)
            other.used = False
            if len(self._blocks) > 1:
                self._fetch(other, (index + 1) % len(self._blocks))
        return buffer

    def _fetch(self, buffer: "_Buffer", index: int) -> None:
        buffer.index, buffer.used = index, False
        source = self._bank.flat.detach()[slice(*self._blocks[index].pairs)]
        target = buffer.pairs[: len(source)]
        self.fetched_bytes += source.nbytes
        if self._stream is None:
            target.copy_(source)
            return
        # Wait for work that reads the buffer.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            # A buffer may be dropped in the meantime: its memory is reused after the copy.
            target.record_stream(self._stream)
            buffer.ready = self._stream.record_event()


@dataclass
class _Buffer:
    """Memory for the pairs of the block `index`, which have arrived once `ready` is reached."""

    pairs: Tensor
    index: int = -1
    used: bool = False
    ready: torch.Event | None = None


def _pinned(flat: Tensor) -> Tensor:
    if torch.cuda.is_available() and flat.device.type == "cpu" and not flat.is_pinned():
        with contextlib.suppress(RuntimeError):
            return flat.pin_memory()
    return flat
