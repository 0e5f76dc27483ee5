"""Inputs of a benchmark: valid sizes and reproducible content."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..models.config import VAEConfig

# Size of the moving colours in pixels and in frames.
_BLOB_PIXELS, _BLOB_FRAMES = 32, 4


@dataclass(frozen=True)
class Clip:
    """Size of a video: width and height in pixels, and number of frames."""

    width: int
    height: int
    frames: int

    def __str__(self) -> str:
        count = "1 frame" if self.frames == 1 else f"{self.frames} frames"
        return f"{count} of {self.width} x {self.height}"


def fitted(config: VAEConfig, clip: Clip) -> Clip:
    """Crop a clip to whole latents, as an encode does."""
    step, group = config.spatial_compression, config.temporal_compression
    if min(clip.width, clip.height) < step or clip.frames < 1:
        raise ValueError(f"{clip}; expected at least 1 frame of {step} x {step}")
    width, height = (side - side % step for side in (clip.width, clip.height))
    return Clip(width, height, clip.frames - (clip.frames - 1) % group)


def random_latent(config: VAEConfig, clip: Clip) -> Tensor:
    """Draw a latent with the channel statistics of a VAE, equal for equal sizes."""
    step = config.spatial_compression
    size = config.latent_frames(clip.frames), clip.height // step, clip.width // step
    seeded = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, config.latent_channels, *size, generator=seeded)
    mean, std = torch.tensor([config.latent_mean, config.latent_std]).view(2, 1, -1, 1, 1, 1)
    return drawn * std + mean


def moving_pictures(clip: Clip) -> Tensor:
    """Draw soft, moving colours `[1, 3, T, H, W]` in [0, 1], equal for equal sizes."""
    size, blob = (clip.frames, clip.height, clip.width), (_BLOB_FRAMES, _BLOB_PIXELS, _BLOB_PIXELS)
    blobs = [-(-side // of) + 1 for side, of in zip(size, blob, strict=True)]
    colours = torch.rand(1, 3, *blobs, generator=torch.Generator().manual_seed(0))
    return functional.interpolate(colours, size, mode="trilinear", align_corners=True)
