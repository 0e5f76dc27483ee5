"""What one video's pass through the network remembers between two steps, and its memory.

Wan's VAE sees the past only through its causal convolutions: each needs the last `kernel - stride`
frames of its own input, and nothing else crosses time (wan/modules/vae.py, CACHE_T). So one
`TemporalCache` is one video: it is made when the video starts, handed down through the layers, and
dropped.
"""

import functools
from math import prod

import torch
from torch import Tensor, nn

# Blocks from this size on are kept for the next result. glibc maps blocks over 32 MB afresh each
# time, and the first touch of 50 MB of fresh pages takes 13-30 ms, as long as the convolution that
# fills them takes on a CPU with AMX; smaller ones it hands out again by itself.
_KEPT_BYTES = 32 << 20

# A block that is larger than this many times what is asked for stays free for something else.
_WASTE = 1.5


class TemporalCache:
    """The tails of the causal convolutions, and the memory that activations are made in.

    Attributes:
        first: The pass holds the first frame of the video; it stands alone, with nothing before it.
        lone: The video is that one frame, so nothing is kept.
        band_bytes: Size of the bands of rows that some layers divide their work into, where it is
            much larger; None: they never do.
        after_first: Layers, for those that ask, that have seen the first frame and no other yet.
    """

    def __init__(self, *, lone: bool = False, band_bytes: int | None = None) -> None:
        self.first = True
        self.lone = lone
        self.band_bytes = band_bytes
        self.after_first: set[nn.Module] = set()
        self._tails: dict[nn.Module, Tensor] = {}
        self._scratch: Tensor | None = None
        self._blocks: list[Tensor] = []

    def scratch(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Lend a channels-last buffer, valid until the next call.

        It is one memory for all: fresh pages would cost as much as the arithmetic.

        Args:
            shape: `[B, C, T, H, W]`.
            like: Gives dtype and device.

        Returns:
            Uninitialised memory of that shape. Under autograd it is a tensor of its own.
        """
        if torch.is_grad_enabled():
            batch, channels, frames, height, width = shape
            memory = (batch, frames, height, width, channels)
            return torch.empty(memory, dtype=like.dtype, device=like.device).movedim(-1, 1)
        nbytes = prod(shape) * like.element_size()
        block = self._scratch
        if block is None or block.numel() < nbytes or block.device != like.device:
            del block
            self._scratch = None  # given back before the larger one is asked for
            block = self._scratch = _bytes(shape, like)
        return _video_of(block, shape, like)

    def reused(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor | None:
        """Lend channels-last memory for a result, where fresh memory would be costly.

        The memory comes back by itself when the last tensor on it is gone.

        Args:
            shape: `[B, C, T, H, W]`.
            like: Gives dtype and device.

        Returns:
            Uninitialised memory of that shape; None where a fresh tensor costs no more.
        """
        nbytes = prod(shape) * like.element_size()
        kept = like.device.type == "cpu" and nbytes >= _KEPT_BYTES
        if not kept or torch.is_grad_enabled() or _count_alone() is None:
            return None
        free = [block for block in self._blocks if _users(block) == 1]
        fitting = [block for block in free if nbytes <= block.numel() <= _WASTE * nbytes]
        if not fitting:
            # What is free and of another size belongs to layers that are done.
            self._blocks = [b for b in self._blocks if not any(b is other for other in free)]
            del free
            fitting = [_bytes(shape, like)]
            self._blocks += fitting
        return _video_of(min(fitting, key=Tensor.numel), shape, like)

    def tail(self, conv: nn.Module, context: int, x: Tensor) -> Tensor:
        """The frames that a causal convolution saw last; zeros before the start of the video.

        Args:
            conv: The convolution; the key of its tail.
            context: Frames that it looks back.
            x: `[B, C, T, H, W]`; gives shape, dtype and device.

        Returns:
            `[B, C, context, H, W]`, channels-last: the memory of the tail itself, for the caller to
            bring up to date.
        """
        tail = self._tails.get(conv)
        if tail is None:
            batch, channels, _, height, width = x.shape
            memory = (batch, context, height, width, channels)
            tail = torch.zeros(memory, dtype=x.dtype, device=x.device).movedim(-1, 1)
            self._tails[conv] = tail
        return tail

    def window(self, conv: nn.Module, context: int, x: Tensor) -> Tensor:
        """The frames that a causal convolution saw last and the new ones, which become the tail.

        Args:
            conv: The convolution; the key of its tail.
            context: Frames that it looks back.
            x: `[B, C, T, H, W]`, its new input.

        Returns:
            `[B, C, context + T, H, W]`, channels-last; but under autograd valid as `scratch` is.
        """
        tail = self.tail(conv, context, x)
        if torch.is_grad_enabled():
            self.keep(conv, context, x)
            return torch.cat([tail, x], dim=2)
        batch, channels, frames, height, width = x.shape
        window = self.scratch((batch, channels, context + frames, height, width), x)
        window[:, :, :context] = tail
        window[:, :, context:] = x
        self.keep(conv, context, x)
        return window

    def keep(self, conv: nn.Module, context: int, x: Tensor) -> None:
        """Bring the tail of a convolution up to date with frames that it saw, or passed by.

        Args:
            conv: The convolution; the key of its tail.
            context: Frames that it looks back.
            x: `[B, C, T, H, W]`, the newest of its input.
        """
        if self.lone or not context:
            return
        tail = self.tail(conv, context, x)
        last = x[:, :, -context:]
        if torch.is_grad_enabled():
            self._tails[conv] = torch.cat([tail, last], dim=2)[:, :, -context:]
            return
        older = context - last.shape[2]
        if older:
            tail[:, :, :older] = tail[:, :, -older:].clone()
        tail[:, :, older:] = last


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


def _bytes(shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
    nbytes = prod(shape) * like.element_size()
    return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


def _video_of(block: Tensor, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
    """View bytes as a channels-last `[B, C, T, H, W]`."""
    batch, channels, frames, height, width = shape
    pool = block[: prod(shape) * like.element_size()].view(like.dtype)
    return pool.view(batch, frames, height, width, channels).permute(0, 4, 1, 2, 3)
