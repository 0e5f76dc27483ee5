"""The state of one video between two steps.

Wan's VAE sees the past through its causal convolutions only: each needs the last `kernel - stride`
frames of its own input (wan/modules/vae.py, CACHE_T). So one `TemporalCache` belongs to one video:
it is created when the video starts, passed down through the layers, and dropped at the end.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...kernels import new_video, zero_of
from .frame_runs import Settling
from .inputs.coding import Coding
from .lines import FrameShard
from .workspace import Workspace


class TemporalCache:
    """The tails of the causal convolutions, and the memory for activations."""

    def __init__(
        self,
        *,
        single_frame: bool = False,
        band_bytes: int | None = None,
        workspace: Workspace | None = None,
        shard: FrameShard | None = None,
        coding: Coding | None = None,
    ) -> None:
        self.first = True  # The current step holds the first frame of the video, and only that
        self.single_frame = single_frame  # The video has only this frame, so nothing is kept
        self.band_bytes = band_bytes  # Bands of rows of much larger frames; None: no bands
        self.thrifty = False  # Memory is short: tails are on the host unless their layer runs
        self.shard = shard  # The part that this process has; None: whole frames, or a tile
        self.coding = coding
        # Frames until the next input is static, the only ones that are computed; None: all.
        self.settling: Settling | None = None
        # Layers, of those that ask, which have seen the first frame only.
        self.after_first: set[nn.Module] = set()
        self.workspace = Workspace() if workspace is None else workspace
        self.scratch, self.reused = self.workspace.scratch, self.workspace.reused
        self.attempt = self.workspace.attempt
        self._tails: dict[nn.Module, Tensor] = {}

    def result(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Return channels-last memory for a result: reused where new memory is slow, or new."""
        memory = self.reused(shape, like)
        return self.attempt(lambda: new_video(like, shape)) if memory is None else memory

    def tail(self, conv: nn.Module, context: int, x: Tensor) -> Tensor:
        """Return the last input frames of a causal convolution; zeros at the start of the video.

        It is the tail itself: the caller updates it before any other allocation, which can move it.
        """
        tail = self._tails.get(conv)
        if tail is None:
            batch, channels, _, height, width = x.shape
            shape = (batch, channels, context, height, width)
            tail = self._tails[conv] = self.attempt(
                lambda: new_video(x, shape).fill_(zero_of(x.dtype))
            )
        elif tail.device != x.device:
            tail = self._tails[conv] = self.attempt(functools.partial(tail.to, x.device))
        return tail

    def window(self, conv: nn.Module, context: int, x: Tensor) -> Tensor:
        """Join the tail and the new frames in scratch memory, and update the tail."""
        batch, channels, frames, height, width = x.shape
        window = self.scratch((batch, channels, context + frames, height, width), x)
        window[:, :, :context] = self.tail(conv, context, x)
        window[:, :, context:] = x
        self.keep(conv, context, x)
        return window

    def keep(self, conv: nn.Module, context: int, x: Tensor) -> None:
        """Update the tail of a convolution with new input frames; it allocates only a new tail.

        A tail that was moved to the host is updated there.
        """
        if self.single_frame or not context:
            return
        known = self._tails.get(conv)
        tail = self.tail(conv, context, x) if known is None else known
        last = x[:, :, -context:]
        older = context - last.shape[2]
        for frame in range(older):  # one by one: the frames overlap
            tail[:, :, frame] = tail[:, :, frame + last.shape[2]]
        tail[:, :, older:] = last

    def put_back(self, conv: nn.Module, before: Tensor) -> None:
        """Restore the tail of `conv` to `before` `[B, C, context, H, W]`."""
        if conv in self._tails:
            self._tails[conv].copy_(before)

    def tails(self) -> dict[nn.Module, Tensor]:
        """Return the tails `[B, C, context, H, W]` by convolution."""
        return dict(self._tails)

    def take(self, tails: dict[nn.Module, Tensor]) -> None:
        """Continue from `tails` `[B, C, context, H, W]` of another cache, after the first frame."""
        self._tails = dict(tails)
        self.first = False

    def exchange(self, place: Callable[[nn.Module, Tensor], Tensor]) -> None:
        """Replace each tail `[B, C, context, H, W]` by the result of `place` for it."""
        self._tails = {conv: place(conv, tail) for conv, tail in self.tails().items()}

    def park(self) -> bool:
        """Move all tails to the host until they are used; return whether that freed memory."""
        away = {conv: tail for conv, tail in self._tails.items() if tail.device.type != "cpu"}
        self._tails.update((conv, tail.cpu()) for conv, tail in away.items())
        self.thrifty = True
        return bool(away)
