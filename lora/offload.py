"""The place of a bank's pairs when a layer needs them.

They are on the device of the computation if there is room; they take about a hundredth of the
model. Otherwise the bank is on the host, pinned if possible, and the pairs of a block are fetched
while the block before it runs, into one of two buffers.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .bank import Bank, BankLayer


class PairLoader:
    """Provides the pairs of a bank's layers on a device.

    Args:
        bank: The bank.
        device: Device of the computation.
        staged: Fetch by blocks, wherever the bank is.

    Attributes:
        hits: Blocks that had arrived when they were needed.
        misses: Blocks that were waited for.
        fetched_bytes: Bytes that were fetched.
        is_here: All pairs are on the device.
    """

    def __init__(self, bank: Bank, device: torch.device, *, staged: bool = False) -> None:
        self.hits = self.misses = self.fetched_bytes = 0
        self._bank, self._device = bank, device
        self.is_here = bank.flat.device == device and not staged
        self._spans = bank.blocks()
        self._buffers: list[_Buffer] = []
        if not self.is_here and self._spans:
            most = max(last - first for first, last in self._spans)
            self._buffers = [_Buffer(bank.flat.new_empty(most, device=device)) for _ in range(2)]
        self._span_of = {
            layer.target: index
            for layer in bank.layers.values()
            for index, (first, last) in enumerate(self._spans)
            if first <= layer.at < last
        }
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if not self.is_here:
            # In place: pinned once for all runs, without a second copy on the host.
            bank.flat.data = _pinned(bank.flat.data)

    def pairs(self, layer: BankLayer) -> tuple[Tensor, Tensor]:
        """Return `down` `[rank, in]`, `up` `[out, rank]` of `layer`, valid until the next block."""
        if self.is_here:
            return layer.pairs(self._bank.flat)
        index = self._span_of[layer.target]
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
            if len(self._spans) > 1:
                self._fetch(other, (index + 1) % len(self._spans))
        return layer.pairs(buffer.memory, self._spans[index][0])

    def _fetch(self, buffer: "_Buffer", index: int) -> None:
        first, last = self._spans[index]
        source = self._bank.flat.detach()[first:last]
        buffer.index, buffer.used = index, False
        self.fetched_bytes += source.numel() * source.element_size()
        target = buffer.memory[: last - first]
        if self._stream is None:
            target.copy_(source)
            return
        # Wait for work that reads the buffer.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            buffer.ready = self._stream.record_event()


@dataclass
class _Buffer:
    """Memory for the pairs of the block `index`; they have arrived once `ready` is reached."""

    memory: Tensor
    index: int = -1
    used: bool = False
    ready: torch.Event | None = None


def _pinned(flat: Tensor) -> Tensor:
    if torch.cuda.is_available() and flat.device.type == "cpu" and not flat.is_pinned():
        with contextlib.suppress(RuntimeError):
            return flat.pin_memory()
    return flat
