"""What one video's pass through the network remembers between two steps.

Wan's VAE sees the past only through its causal convolutions: each needs the last `kernel - stride`
frames of its own input, and nothing else crosses time (wan/modules/vae.py, CACHE_T). So one
`TemporalCache` is one video: it is made when the video starts, handed down through the layers, and
dropped.
"""

from math import prod

import torch
from torch import Tensor, nn


class TemporalCache:
    """The tails of the causal convolutions, and the buffer that their inputs are made in.

    Attributes:
        first: The pass holds the first frame of the video; it stands alone, with nothing before it.
        lone: The video is that one frame, so nothing is kept.
    """

    def __init__(self, *, lone: bool = False) -> None:
        self.first = True
        self.lone = lone
        self._tails: dict[nn.Module, Tensor] = {}
        self._scratch: Tensor | None = None

    def scratch(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Lend a channels-last buffer, valid until the next call.

        It is one memory for all: fresh pages would cost as much as the arithmetic.

        Args:
            shape: `[B, C, T, H, W]`.
            like: Gives dtype and device.

        Returns:
            Uninitialised memory of that shape. Under autograd it is a tensor of its own.
        """
        count = prod(shape)
        if torch.is_grad_enabled():
            pool = torch.empty(count, dtype=like.dtype, device=like.device)
        else:
            nbytes = count * like.element_size()
            if (
                self._scratch is None
                or self._scratch.numel() < nbytes
                or self._scratch.device != like.device
            ):
                self._scratch = None
                self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
            pool = self._scratch[:nbytes].view(like.dtype)
        batch, channels, frames, height, width = shape
        return pool.view(batch, frames, height, width, channels).permute(0, 4, 1, 2, 3)

    def window(self, conv: nn.Module, context: int, x: Tensor) -> Tensor:
        """Begin the input of a causal convolution: the frames it saw last, and room for new ones.

        Args:
            conv: The convolution; the key of its tail.
            context: Frames that it looks back.
            x: `[B, C, T, H, W]`; gives shape, dtype and device.

        Returns:
            `[B, C, context + T, H, W]`; the last `T` frames are for the caller to write. Frames
            before the start of the video are zeros.
        """
        batch, channels, frames, height, width = x.shape
        window = self.scratch((batch, channels, context + frames, height, width), x)
        tail = self._tails.get(conv)
        known = 0 if tail is None else tail.shape[2]
        window[:, :, : context - known].zero_()
        if tail is not None:
            window[:, :, context - known : context].copy_(tail)
        return window

    def keep(self, conv: nn.Module, context: int, x: Tensor) -> None:
        """Remember the last `context` frames of `x` as the tail of `conv`, in memory of their own.

        Args:
            conv: The convolution; the key of its tail.
            context: Frames that it looks back.
            x: `[B, C, T, H, W]`, its input so far. Of a shorter `x` every frame is kept.
        """
        if self.lone:
            return
        last = x[:, :, -context:]
        tail = self._tails.get(conv)
        if tail is not None and tail.shape == last.shape and not torch.is_grad_enabled():
            tail.copy_(last)
        else:
            self._tails[conv] = last.clone(memory_format=torch.preserve_format)
