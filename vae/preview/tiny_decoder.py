"""Tiny decoders of Wan's latents: frames of a lower quality in a thirtieth of the arithmetic.

The network is `TAEHV` of madebyollin/taehv (taehv.py, MIT), in the layout of its files `taew2_1`
and `taew2_2` and of `lighttaew2_1` and `lighttaew2_2` by LightX2V: three levels of residual blocks
that also see their input of the frame before (`MemBlock`), each followed by nearest 2x upsampling,
a 1x1 convolution to one or two frames (`TGrow`) and a 3x3 convolution. The last two levels double
the frames: latent frame `i` becomes the frames `4 i` to `4 i + 3`, and the first three of all are
dropped.

Here a block's first convolution, over a frame and the one before, is a causal convolution with two
temporal taps. No activation lies between upsampling and the 3x3 convolution after it, so the 1x1
convolution is multiplied into the 3x3 one when a file is loaded, and the pair runs as one folded
convolution of the small picture: 4 products per weight instead of 9, and no 1x1 pass at the large
size. Frames that are dropped are computed only as far as later frames see them.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import interleave_time
from ..layers.causal_conv import CausalConv3d
from ..layers.conv import Terms
from ..layers.resample_conv import UpsampleConv2d
from ..layers.temporal_cache import TemporalCache
from ..streaming.precision import layer_modes
from ..validation import check_tensor, dtype_name

# Channels of the three levels and after them, and frames per frame behind each level.
WIDTHS = (256, 128, 64, 64)
TIMES = (1, 2, 2)

BLOCKS = 3

# Frames in front that are dropped, as the published code does (`frames_to_trim`).
_DROPPED = 3

# Pixels of the last convolution in a step: two latent frames of 720 x 1280, four of 480 x 832. A
# CPU gets one of 480 x 832, because a caller can stop only between steps, and more is no faster:
# 9 frames in float32 take 3.0 s with one latent frame and with three.
_STEP_PIXELS, _STEP_PIXELS_ON_CPU = 2 * 720 * 1280, 480 * 832

# Values in memory per such pixel: for a frame at the end, and for each latent frame of a step.
# Counted on a CPU: 315 to 380 with one latent frame, 680 to 900 with four.
_VALUES_OF_FRAME, _VALUES_OF_LATENT = 220, 180


class MemBlock(nn.Module):
    """A residual block of three convolutions whose first also sees the frame before.

    `MemBlock` of taehv.py. The frame before the first is zero.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = CausalConv3d(channels, channels, (2, 3, 3))
        self.second = CausalConv3d(channels, channels, (1, 3, 3))
        self.third = CausalConv3d(channels, channels, (1, 3, 3))

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the block; the memory of `x`, `[B, C, T, H, W]`, may become the result."""
        y = torch.relu_(self.first(x, cache))
        y = torch.relu_(self.second(y, cache))
        return torch.relu_(self.third(y, cache, terms=Terms(residual=x)))


class TinyDecoder(nn.Module):
    """A decoder of `tiny_checkpoint.load_tiny_decoder`.

    `mean` and `std` of the latent channels: the file was trained on normalised latents.
    """

    latent_mean: Tensor | None
    latent_std: Tensor | None

    def __init__(
        self,
        latent_channels: int,
        patch: int,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__()
        self.latent_channels, self.patch = latent_channels, patch
        self.spatial_compression = 8 * patch
        self.normalizes = mean is not None
        for name, values in (("latent_mean", mean), ("latent_std", std)):
            tensor = None if values is None else torch.tensor(values).view(-1, 1, 1, 1)
            self.register_buffer(name, tensor, persistent=False)
        self.enter = CausalConv3d(latent_channels, WIDTHS[0], (1, 3, 3))
        self.levels = nn.ModuleList(
            nn.ModuleList(MemBlock(width) for _ in range(BLOCKS)) for width in WIDTHS[:-1]
        )
        self.grow = nn.ModuleList(
            nn.ModuleList(UpsampleConv2d(width, after) for _ in range(times))
            for width, after, times in zip(WIDTHS, WIDTHS[1:], TIMES, strict=False)
        )
        self.leave = CausalConv3d(WIDTHS[-1], 3 * patch**2, (1, 3, 3))

    @property
    def device(self) -> torch.device:
        """Device of the weights and the computation."""
        return self.enter.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and the computation."""
        return self.enter.weight.dtype

    def decode(self, latent: Tensor, chunk: int | None = None) -> Tensor:
        """Decode a latent, not normalised, to `[B, 3, 4 t - 3, H, W]` in about [0, 1]."""
        pieces, at = self.decode_stream(latent, chunk), 0
        batch, _, latent_frames, height, width = latent.shape
        size = (height * self.spatial_compression, width * self.spatial_compression)
        frames = torch.empty(
            batch, 3, 4 * latent_frames - _DROPPED, *size, dtype=self.dtype, device=self.device
        )
        for piece in pieces:
            frames[:, :, at : at + piece.shape[2]] = piece
            at += piece.shape[2]
        return frames

    def decode_stream(self, latent: Tensor, chunk: int | None = None) -> Iterator[Tensor]:
        """Yield frames `[B, 3, n, H, W]` in about [0, 1], not clamped, as soon as they are done.

        `chunk` is latent frames per step (-1: all; None: chosen from the size): any value gives the
        same frames, and memory grows with it and not with `t`.
        """
        check_tensor(latent, "latent", self.latent_channels)
        if not latent.is_floating_point():
            raise ValueError(f"latent is {dtype_name(latent.dtype)}; expected a float dtype")
        if chunk is not None and chunk != -1 and chunk < 1:
            raise ValueError(f"chunk is {chunk}; expected at least 1, or -1 for all latent frames")
        return self._frames(latent, self._chunk(latent.shape, chunk))

    def peak_bytes(self, shape: Sequence[int], chunk: int | None = None) -> int:
        """Return the bytes that a stream needs for activations, without its frames."""
        values = _VALUES_OF_FRAME + _VALUES_OF_LATENT * min(shape[2], self._chunk(shape, chunk))
        return values * _pixels(shape) * self.dtype.itemsize

    def normalize(self, latent: Tensor) -> Tensor:
        """Return `latent` `[B, C_latent, t, h, w]` as the file expects it, in float32."""
        latent = latent.float()
        if self.latent_mean is None or self.latent_std is None:
            return latent
        mean, std = (each.to(latent) for each in (self.latent_mean, self.latent_std))
        return (latent - mean) / std

    def _chunk(self, shape: Sequence[int], chunk: int | None) -> int:
        """Return the latent frames of a step."""
        if chunk is None:
            most = _STEP_PIXELS_ON_CPU if self.device.type == "cpu" else _STEP_PIXELS
            return max(1, most // _pixels(shape))
        return shape[2] if chunk == -1 else chunk

    def _frames(self, latent: Tensor, step: int) -> Iterator[Tensor]:
        """Yield the frames of `step` latent frames at a time."""
        cache = TemporalCache()
        cache.first = False  # the zero tail of each block stands for the frame before the first
        for start in range(0, latent.shape[2], step):
            with layer_modes(self.device, full=self.dtype == torch.float32):
                part = latent[:, :, start : start + step].detach().to(self.device)
                frames = self._step(part, cache, is_first=start == 0)
            yield frames

    def _step(self, latent: Tensor, cache: TemporalCache, *, is_first: bool) -> Tensor:
        """Decode the next latent frames."""
        x = (torch.tanh(self.normalize(latent) / 3) * 3).to(self.dtype)  # `Clamp` of taehv.py
        x = torch.relu_(self.enter(x.contiguous(memory_format=torch.channels_last_3d), cache))
        *levels, final = self.levels.children()
        for level, grow in zip(levels, self.grow.children(), strict=False):
            for block in level.children():
                x = block(x, cache)
            x = _grown(x, grow, cache)
        *blocks, last = cast(list[MemBlock], list(final.children()))
        for block in blocks:
            x = block(x, cache)
        if is_first:
            # Both frames behind the first one are dropped: only the next one sees its input.
            last.first.keep(x[:, :, :1], cache)
            x = x[:, :, 1:].contiguous(memory_format=torch.channels_last_3d)
        return self._pictures(last(x, cache), cache, is_first=is_first)

    def _pictures(self, x: Tensor, cache: TemporalCache, *, is_first: bool) -> Tensor:
        """Run the last level frame by frame, because its activations are the largest."""
        phases = list(self.grow[-1].children())
        done: list[Tensor] = []
        for at in range(x.shape[2]):
            frame = x[:, :, at : at + 1].contiguous(memory_format=torch.channels_last_3d)
            for grow in phases[_DROPPED % len(phases) :] if is_first and at == 0 else phases:
                large = torch.relu_(grow(frame, cache))
                done.append(self._shuffled(self.leave(large, cache)))
                del large
        return torch.cat(done, dim=2)

    def _shuffled(self, x: Tensor) -> Tensor:
        """Return the pixels `[B, 3, 1, H, W]` of patches."""
        if self.patch == 1:
            return x
        return F.pixel_shuffle(x.squeeze(2), self.patch).unsqueeze(2)


def _pixels(shape: Sequence[int]) -> int:
    """Return the pixels of the last convolution, of all videos of a latent of this shape."""
    return shape[0] * shape[3] * shape[4] * 8**2


def _grown(x: Tensor, phases: nn.Module, cache: TemporalCache) -> Tensor:
    """Return `len(phases)` frames of twice the size per frame of `x` `[B, C, T, H, W]`."""
    grown = [phase(x, cache) for phase in phases.children()]
    if len(grown) == 1:
        return grown[0]
    joined = torch.cat(grown, dim=1).contiguous(memory_format=torch.channels_last_3d)
    return interleave_time(joined, len(grown))
