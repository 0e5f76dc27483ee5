"""The state of one video between two steps, and the reused memory of its activations.

Wan's VAE sees the past through its causal convolutions only: each needs the last `kernel - stride`
frames of its own input (wan/modules/vae.py, CACHE_T). So one `TemporalCache` belongs to one video:
it is created when the video starts, passed down through the layers, and dropped at the end.
"""

import functools
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from ...kernels import has_own_memory, new_video, zero_of
from .inputs.coding import Coding

# Blocks from this size on are kept for later results. glibc maps blocks over 32 MB anew each time,
# and the first touch of 50 MB of new pages takes 13-30 ms, as long as the convolution that fills
# them on a CPU with AMX. glibc reuses smaller blocks itself.
KEPT_BYTES = 32 << 20

# A block larger than this many times the requested size is not used for it.
_WASTE = 1.5


class Workspace:
    """Memory for short-lived activations; one for all tiles of a stream."""

    def __init__(self) -> None:
        self._scratch: Tensor | None = None
        self._views: dict[object, Tensor] = {}  # of the scratch memory
        self._blocks: list[Tensor] = []

    def scratch(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Return a channels-last buffer that is valid until the next call; all share one memory."""
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
        """Return memory that is free when its last tensor is gone; None: a new one is as fast."""
        nbytes = prod(shape) * like.element_size()
        kept = nbytes >= KEPT_BYTES and not (like.is_meta or has_own_memory(like.device))
        alone = _count_alone() if kept else None
        if alone is None:
            return None
        free = [block for block in self._blocks if _count(block) == alone]
        fitting = [block for block in free if nbytes <= block.numel() <= _WASTE * nbytes]
        if not fitting:
            # Free blocks of another size belong to layers that are done.
            self._blocks = [b for b in self._blocks if not any(b is other for other in free)]
            del free
            fitting = [_allocated(nbytes, like.device)]
            self._blocks += fitting
        return _video_of(min(fitting, key=Tensor.numel), shape, like)


@dataclass(frozen=True)
class Settling:
    """The frames of a run until it is static.

    If a run ends in identical frames, the results of a causal layer are identical too, after its
    reach. The frames after the first `fresh` are copies of the last of these; if it is 0 or less,
    of the frame before the run.
    """

    frames: int
    fresh: int

    @property
    def needed(self) -> int:
        """Frames of the run that must be computed."""
        return max(0, min(self.fresh, self.frames))

    def behind(self, taps: int, stride: int) -> "Settling":
        """Return the run after a causal convolution with `taps` and `stride`."""
        # Result `j` sees `taps` frames up to `j * stride + stride - 1`: static if the first one is.
        first = -(-(self.fresh - 1 + taps - stride) // stride)
        return Settling(self.frames // stride, first + 1)

    def part(self, start: int, frames: int) -> "Settling":
        """Return the part of the run with `frames` frames from `start` on."""
        return Settling(frames, self.fresh - start)


class TemporalCache:
    """The tails of the causal convolutions, and the memory for activations."""

    def __init__(
        self,
        *,
        single_frame: bool = False,
        band_bytes: int | None = None,
        workspace: Workspace | None = None,
        coding: Coding | None = None,
        route_token: object | None = None,
        same_shapes: bool = False,
        first: bool = True,
    ) -> None:
        self.first = first  # The current step holds the first frame of the video, and only that
        self.single_frame = single_frame  # The video has only this frame, so nothing is kept
        self.band_bytes = band_bytes  # Bands of rows of much larger frames; None: no bands
        self.coding = coding
        self.same_shapes = same_shapes  # Another shape of a convolution would cost a search
        # Frames until the next input is static, the only ones that are computed; None: all.
        self.settling: Settling | None = None
        # Layers, of those that ask, which have seen the first frame only.
        self.after_first: set[nn.Module] = set()
        self.workspace = Workspace() if workspace is None else workspace
        self.scratch, self.reused = self.workspace.scratch, self.workspace.reused
        self.tails: dict[nn.Module, Tensor] = {}  # `[B, C, context, H, W]` by convolution
        # Stands for the conditions under which the routes of the convolutions are decided.
        self.route_token = route_token or object()

    def result(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Return channels-last memory for a result: reused where new memory is slow, or new."""
        memory = self.reused(shape, like)
        return new_video(like, shape) if memory is None else memory

    def tail(self, conv: nn.Module, context: int, x: Tensor) -> Tensor:
        """Return the last input frames of a convolution, to update; zeros at the start."""
        tail = self.tails.get(conv)
        if tail is None:
            batch, channels, _, height, width = x.shape
            empty = new_video(x, (batch, channels, context, height, width))
            tail = self.tails[conv] = empty.fill_(zero_of(x.dtype))
        return tail

    def keep(self, conv: nn.Module, context: int, x: Tensor) -> None:
        """Update the tail of a convolution with new input frames."""
        if self.single_frame or not context:
            return
        tail = self.tail(conv, context, x)
        last = x[:, :, -context:]
        older = context - last.shape[2]
        for frame in range(older):  # one by one: the frames overlap
            tail[:, :, frame] = tail[:, :, frame + last.shape[2]]
        tail[:, :, older:] = last


def _allocated(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


@functools.cache
def _count_alone() -> int | None:
    """Return the use count of the storage of one tensor, or None if counting does not work."""
    if not hasattr(torch._C, "_storage_Use_Count"):  # not public; PyTorch's CUDA graphs use it
        return None
    block = torch.empty(2)
    alone = _count(block)
    view = block[:1]
    return alone if _count(block) == _count(view) == alone + 1 else None


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


def canonical(x: Tensor) -> Tensor:
    """Give a channels-last `x` `[B, C, T, H, W]` the strides of that format in every dimension.

    PyTorch keeps arbitrary strides in dimensions of size one, and then misjudges the layout of a
    tensor with one frame or one column.
    """
    return x.as_strided(x.shape, _strides(x.shape))
