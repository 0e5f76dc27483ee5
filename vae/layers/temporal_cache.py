"""What one video's pass through the network remembers between two steps.

Wan's VAE sees the past only through its causal convolutions: each needs the last `kernel - stride`
frames of its own input, and nothing else crosses time (wan/modules/vae.py, CACHE_T). So one
`TemporalCache` is one video: it is made when the video starts, handed down through the layers, and
dropped.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...kernels import new_video
from .frame_runs import Settling
from .workspace import Workspace


class TemporalCache:
    """The tails of the causal convolutions, and the memory that activations are made in.

    Attributes:
        first: The pass holds the first frame of the video; it stands alone, with nothing before it.
        single_frame: The video is that one frame, so nothing is kept.
        band_bytes: Size of the bands of rows that some layers divide their work into, where it is
            much larger; None: they never do.
        workspace: Lends the memory of activations; `scratch`, `reused` and `attempt` are its own.
        thrifty: Memory is short: tails are on the host but while their layer runs.
        settling: The run of frames that goes into the next convolution comes to rest: only so many
            need to be made. None: all are.
        after_first: Layers, for those that ask, that have seen the first frame and no other yet.
    """

    def __init__(
        self,
        *,
        single_frame: bool = False,
        band_bytes: int | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.first = True
        self.single_frame = single_frame
        self.band_bytes = band_bytes
        self.thrifty = False
        self.settling: Settling | None = None
        self.after_first: set[nn.Module] = set()
        self.workspace = Workspace() if workspace is None else workspace
        self.scratch, self.reused = self.workspace.scratch, self.workspace.reused
        self.attempt = self.workspace.attempt
        self._tails: dict[nn.Module, Tensor] = {}

    def result(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Channels-last memory for a result: lent where fresh memory is costly, else fresh."""
        memory = self.reused(shape, like)
        return self.attempt(lambda: new_video(like, shape)) if memory is None else memory

    def tail(self, conv: nn.Module, context: int, x: Tensor) -> Tensor:
        """The frames that a causal convolution saw last; zeros before the start of the video.

        Args:
            conv: The convolution; the key of its tail.
            context: Frames that it looks back.
            x: `[B, C, T, H, W]`; gives shape, dtype and device.

        Returns:
            `[B, C, context, H, W]`, channels-last: the memory of the tail itself, for the caller to
            bring up to date before anything else is allocated, which may move the tail.
        """
        tail = self._tails.get(conv)
        if tail is None:
            batch, channels, _, height, width = x.shape
            shape = (batch, channels, context, height, width)
            tail = self._tails[conv] = self.attempt(lambda: new_video(x, shape).zero_())
        elif tail.device != x.device:
            tail = self._tails[conv] = self.attempt(functools.partial(tail.to, x.device))
        return tail

    def window(self, conv: nn.Module, context: int, x: Tensor) -> Tensor:
        """The frames that a causal convolution saw last and the new ones, which become the tail.

        They are `[B, C, context + T, H, W]`, channels-last; but under autograd valid as `scratch`
        is. The arguments are those of `tail`.
        """
        if torch.is_grad_enabled():
            tail = self.tail(conv, context, x)
            self.keep(conv, context, x)
            return torch.cat([tail, x], dim=2)
        batch, channels, frames, height, width = x.shape
        window = self.scratch((batch, channels, context + frames, height, width), x)
        window[:, :, :context] = self.tail(conv, context, x)
        window[:, :, context:] = x
        self.keep(conv, context, x)
        return window

    def keep(self, conv: nn.Module, context: int, x: Tensor) -> None:
        """Bring the tail of a convolution up to date with frames that it saw, or passed by.

        Nothing is allocated where the tail is there already. The arguments are those of `tail`.
        """
        if self.single_frame or not context:
            return
        tail = self.tail(conv, context, x)
        last = x[:, :, -context:]
        if torch.is_grad_enabled():
            self._tails[conv] = torch.cat([tail, last], dim=2)[:, :, -context:]
            return
        older = context - last.shape[2]
        for frame in range(older):  # one by one, which needs no copy of frames that overlap
            tail[:, :, frame] = tail[:, :, frame + last.shape[2]]
        tail[:, :, older:] = last

    def put_back(self, conv: nn.Module, before: Tensor) -> None:
        """Let a convolution remember what it did before, `[B, C, context, H, W]`."""
        if conv in self._tails and not torch.is_grad_enabled():
            self._tails[conv].copy_(before)

    def tails(self) -> dict[nn.Module, Tensor]:
        """What each convolution remembers."""
        return dict(self._tails)

    def take(self, tails: dict[nn.Module, Tensor]) -> None:
        """Go on from what convolutions remembered elsewhere; the first frame has passed."""
        self._tails = dict(tails)
        self.first = False

    def exchange(self, place: Callable[[nn.Module, Tensor], Tensor]) -> None:
        """Put what a function gives for each tail in its place."""
        self._tails = {conv: place(conv, tail) for conv, tail in self._tails.items()}

    def park(self) -> bool:
        """Bring all tails to the host, where they stay but while they are used; did that help?"""
        away = {conv: tail for conv, tail in self._tails.items() if tail.device.type != "cpu"}
        self._tails.update((conv, tail.cpu()) for conv, tail in away.items())
        self.thrifty = True
        return bool(away)
