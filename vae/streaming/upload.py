"""The input of a video on its way to a device: uploaded as it is, converted and checked there.

Conversion of float32 pixels on the host and sweeps for NaN would stop a GPU for 0.5 to 1.5 s in 81
frames of 720 x 1280. Pixels pass through pinned memory on a stream of their own, so that the device
computes the chunk before meanwhile.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels import lacks
from ..pinned_memory import pinned_memory
from ..validation import not_finite, spoiled

# Larger chunks are copied from where they are: pinned memory is taken from all programs.
_STAGED_BYTES = 512 * 2**20


class Upload:
    """The pixels of one video."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        to_range: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._device, self._dtype, self._to_range = device, dtype, to_range
        # On a CPU the values were checked before the work; `meta` has none.
        self._checks = device.type not in ("cpu", "meta")
        self._bad: Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return floats, uint8, or uint16 as int16, in [-1, 1], channels-last."""
        x = self._moved(pixels)
        if x.dtype in (torch.uint8, torch.int16):
            x = to_unit(x)
        else:
            if self._checks:
                bad = not_finite(x).sum()
                self._bad = bad if self._bad is None else self._bad + bad
            x = x if self._to_range is None else self._to_range(x)
        return x.to(self._dtype).contiguous(memory_format=torch.channels_last_3d)

    def check(self) -> None:
        """Wait for the device; raise a `ValueError` if pixels were NaN or infinite."""
        count = 0 if self._bad is None else int(self._bad)
        if count:
            raise spoiled("frames", count)

    def _moved(self, pixels: Tensor) -> Tensor:
        """Return `pixels` on the device, in their dtype."""
        if lacks(self._device, pixels.dtype):
            pixels = pixels.float()
        if self._stream is None or pixels.device.type != "cpu":
            return pixels.to(self._device)
        work = torch.cuda.current_stream(self._device)
        staged = self._staged(pixels)
        with torch.cuda.stream(self._stream):
            x = staged.to(self._device, non_blocking=staged is not pixels)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
        work.wait_event(self._copied)
        x.record_stream(work)
        return x

    def _staged(self, pixels: Tensor) -> Tensor:
        """Return a copy of `pixels` `[B, C, T, H, W]` in pinned memory, or `pixels` without it."""
        if pixels.nbytes > _STAGED_BYTES:
            return pixels
        if self._copied is not None:
            self._copied.synchronize()  # the chunk before left this memory long ago
        if self._staging is None or len(self._staging) < pixels.nbytes:
            self._staging = pinned_memory(pixels.nbytes)
        if self._staging is None:
            return pixels
        flat = self._staging[: pixels.nbytes].view(pixels.dtype)
        strides = torch.empty_like(pixels, device="meta").stride()
        return flat.as_strided(pixels.shape, strides).copy_(pixels)


def uint16_as_int16(frames: Tensor) -> Tensor:
    """Return frames in a dtype that every device has; Apple GPUs lack uint16 before PyTorch 2.9."""
    return frames.view(torch.int16) if frames.dtype == torch.uint16 else frames


def to_unit(frames: Tensor) -> Tensor:
    """Convert uint8, or int16 with the bits of uint16, to float32 in [-1, 1]."""
    if frames.dtype == torch.uint8:
        return frames.float().div_(127.5).sub_(1)
    # With the highest bit flipped the value of int16 is that of uint16 less 32768.
    return frames.bitwise_xor(-0x8000).float().add_(0.5).div_(32767.5)
