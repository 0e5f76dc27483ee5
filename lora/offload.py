"""The place of a bank's tensors when a layer needs them.

They are on the device of the computation if there is room; pairs take about a hundredth of the
model. Otherwise the bank is on the host, pinned if possible, and the tensors of a block are fetched
while the block before it runs, into one of two buffers.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .adapters import Adapter
from .bank import Bank, BankBlock, BankLayer
from .keys import Target


class BankLoader:
    """Provides the tensors of a bank's layers on a device; `staged`: block by block, always."""

    def __init__(self, bank: Bank, device: torch.device, *, staged: bool = False) -> None:
        # Blocks that had arrived when they were needed, and blocks that were waited for.
        self.hits = self.misses = self.fetched_bytes = 0
        self._bank, self._device = bank, device
        self.is_here = bank.flat.device == bank.others.device == device and not staged
        self._blocks: list[BankBlock] = []
        self._buffers: list[_Buffer] = []
        self._block_of: dict[Target, int] = {}
        self._kept: dict[Target, list[Adapter]] = {}
        self._stream: torch.cuda.Stream | None = None
        if not self.is_here:
            self._stage()

    def pairs(self, layer: BankLayer) -> tuple[Tensor, Tensor]:
        """Return `down` `[rank, in]`, `up` `[out, rank]` of `layer`, valid until the next block."""
        if self.is_here:
            return layer.pairs(self._bank.flat)
        buffer = self._buffer_of(layer)
        return layer.pairs(buffer.pairs, self._blocks[buffer.index].pairs[0])

    def adapters(self, layer: BankLayer) -> list[Adapter]:
        """Return the other adapters of `layer`, valid until the next block."""
        if self.is_here:
            return layer.adapters(self._bank.others)
        buffer = self._buffer_of(layer)
        return layer.adapters(buffer.others, self._blocks[buffer.index].others[0])

    def kept_adapters(self, layer: BankLayer) -> list[Adapter]:
        """Return the other adapters of `layer`, which stay on the device; for small ones."""
        if self.is_here:
            return layer.adapters(self._bank.others)
        if layer.target not in self._kept:
            found = layer.adapters(self._bank.others.detach())
            self._kept[layer.target] = [adapter.to(self._device) for adapter in found]
        return self._kept[layer.target]

    def _stage(self) -> None:
        bank, device = self._bank, self._device
        self._blocks = bank.blocks()
        self._block_of = {
            layer.target: index
            for index, block in enumerate(self._blocks)
            for layer in block.layers
        }
        if self._blocks:
            pairs = max(last - first for _, (first, last), _ in self._blocks)
            others = max(last - first for _, _, (first, last) in self._blocks)
            with torch.inference_mode(False):  # another thread can write them without that mode
                self._buffers = [
                    _Buffer(
                        bank.flat.detach().new_empty(pairs, device=device),
                        bank.others.detach().new_empty(others, device=device),
                    )
                    for _ in range(2)
                ]
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        # In place: pinned once for all runs, without a second copy on the host.
        bank.flat.data = _pinned(bank.flat.data)
        bank.others.data = _pinned(bank.others.data)

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
        block = self._blocks[index]
        buffer.index, buffer.used = index, False
        copies = (
            (buffer.pairs, self._bank.flat.detach()[slice(*block.pairs)]),
            (buffer.others, self._bank.others.detach()[slice(*block.others)]),
        )
        copies = [(memory[: len(source)], source) for memory, source in copies if len(source)]
        self.fetched_bytes += sum(source.nbytes for _, source in copies)
        if self._stream is None:
            for target, source in copies:
                target.copy_(source)
            return
        # Wait for work that reads the buffer.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                # A buffer may be dropped in the meantime: its memory is reused after the copy.
                target.record_stream(self._stream)
            buffer.ready = self._stream.record_event()


@dataclass
class _Buffer:
    """Memory for the tensors of the block `index`; they have arrived once `ready` is reached."""

    pairs: Tensor
    others: Tensor
    index: int = -1
    used: bool = False
    ready: torch.Event | None = None


def _pinned(flat: Tensor) -> Tensor:
    if torch.cuda.is_available() and flat.device.type == "cpu" and not flat.is_pinned():
        with contextlib.suppress(RuntimeError):
            return flat.pin_memory()
    return flat
