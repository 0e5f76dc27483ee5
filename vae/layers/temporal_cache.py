"""The state of one video between two steps.

Wan's VAE sees the past through its causal convolutions only: each needs the last `kernel - stride`
frames of its own input (wan/modules/vae.py, CACHE_T). So one `TemporalCache` belongs to one video:
it is created when the video starts, passed down through the layers, and dropped at the end.
"""

import torch
from torch import Tensor, nn

from ...kernels import new_video, zero_of
from .frame_runs import Settling
from .inputs.coding import Coding
from .workspace import Workspace


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
    ) -> None:
        self.first = True  # The current step holds the first frame of the video, and only that
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
        """Return the last input frames of a causal convolution; zeros at the start of the video.

        It is the tail itself, which the caller may update.
        """
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
