"""The input frames of a causal convolution as a ring, for steps of a single frame.

The new frame replaces the oldest one in place, and the taps of the convolution are turned instead
of the frames, so no earlier frame is copied. A tail in order costs six more passes over a frame in
each step: it is copied in front of the new frame, and moved by one frame.
"""

import torch
from torch import Tensor

from ...kernels import new_video


class FrameRing:
    """The last `context` input frames of a convolution, and the place of the next one.

    Args:
        tail: `[B, C, context, H, W]`, channels-last, oldest first; it is copied.

    Attributes:
        frames: `[B, C, context + 1, H, W]`, channels-last.
        place: Index of the next frame.
    """

    def __init__(self, tail: Tensor) -> None:
        batch, channels, context, height, width = tail.shape
        self.place = context
        self.frames = new_video(tail, (batch, channels, context + 1, height, width))
        self.frames[:, :, :context] = tail

    @property
    def slot(self) -> Tensor:
        """The place of the next frame, `[B, C, 1, H, W]`."""
        return self.frames[:, :, self.place : self.place + 1]

    @property
    def oldest(self) -> int:
        """Index of the oldest frame that the next frame meets."""
        return (self.place + 1) % self.frames.shape[2]

    def turn(self) -> None:
        """Count the frame in `slot` as one of the last frames."""
        self.place = self.oldest

    def tail(self, device: torch.device | str | None = None) -> Tensor:
        """Return the last `context` frames, oldest first, as a new tensor.

        Args:
            device: Device of the result; None: that of the ring.

        Returns:
            `[B, C, context, H, W]`, channels-last.
        """
        batch, channels, count, height, width = self.frames.shape
        like = self.frames if device is None else self.frames.new_empty(0, device=device)
        tail = new_video(like, (batch, channels, count - 1, height, width))
        for at in range(count - 1):
            tail[:, :, at] = self.frames[:, :, (self.oldest + at) % count]
        return tail
