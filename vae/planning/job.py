"""The stream to plan: its network, size and device."""

import functools
import itertools
import math
from dataclasses import dataclass

import torch

from ..layers.conv import Conv
from ..models.base import Network
from ..models.config import VAEConfig
from ..models.receptive_field import Size, frame_sizes, is_encoder

# Shares of the free memory for a plan. More than the first only instead of tiles, which compute
# their halos twice: libraries need some, and freed blocks of other sizes are not always usable. On
# a CPU other programs need it too.
_SHARES = (0.8, 0.9)
_CPU_SHARES = (0.5, 0.9)


@dataclass(frozen=True)
class StreamJob:
    """The stream to plan."""

    network: Network
    latent_size: tuple[int, int, int]  # batch, height, width
    dtype: torch.dtype
    device: torch.device
    single_frame: bool = False
    pixels: int = 1  # of an image per pixel of the network's frames
    coded: frozenset[str] = frozenset()  # names of the convolutions that read codes

    @functools.cached_property
    def encodes(self) -> bool:
        """Whether the network is an encoder, so that tiles come before whole frames."""
        return is_encoder(self.network)

    @functools.cached_property
    def sizes(self) -> list[Size]:
        """Height and width before each layer and after the last."""
        layers, (_, height, width) = self.network.layers(), self.latent_size
        if self.encodes:
            scale = math.prod(float(layer.scale) for layer in layers)
            height, width = int(height / scale), int(width / scale)
        return frame_sizes(layers, (height, width))

    @property
    def end(self) -> Size:
        """Height and width of the frames, which tiles divide."""
        return self.sizes[0 if self.encodes else -1]

    @functools.cached_property
    def frames(self) -> int:
        """Frames of the input per latent."""
        modules = () if self.single_frame else self.network.modules()
        return math.prod(each.stride for each in modules if isinstance(each, Conv))

    @functools.cached_property
    def works(self) -> list[int]:
        """Approximate products of each layer for one latent."""
        works, frames = list[int](), self.frames * self.latent_size[0]
        layers, sizes = self.network.layers(), itertools.pairwise(self.sizes)
        for layer, size in zip(layers, sizes, strict=True):
            convs = [each for each in layer.modules() if isinstance(each, Conv)]
            area = max(map(math.prod, size))
            works.append(frames * area * sum(conv.weight.numel() for conv in convs))
            frames = frames * math.prod(part.times for part in layer.blocks)
            frames //= math.prod(conv.stride for conv in convs)
        return works

    @property
    def parks(self) -> bool:
        """Whether tails can wait on the host; there are none on it, on `meta` or of a picture."""
        return self.device.type not in ("cpu", "meta") and not self.single_frame

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the free memory: the usual one, and the largest."""
        return _CPU_SHARES if self.device.type == "cpu" else _SHARES


def job_of(
    network: Network,
    config: VAEConfig,
    latent_size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    single_frame: bool,
    coded: frozenset[str] = frozenset(),
) -> StreamJob:
    """Return the job of a stream of latents of this batch, height and width."""
    pixels = config.patch_size
    if not is_encoder(network):
        pixels *= config.output_scale
    single_frame = single_frame or config.is_of_pictures
    return StreamJob(network, latent_size, dtype, device, single_frame, pixels, coded)
