"""Random weights of the families, in the published widths or others, and random inputs."""

import torch
from torch import Tensor

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.wan22 import random_wan22

# Base width of the encoder; the decoder of Wan 2.2 is wider.
WIDTHS = {"wan2.1": 96, "wan2.2": 160, "seedvr2": 128}


def random_weights(
    family: str, width: int | None = None, decoder: int | None = None
) -> dict[str, Tensor]:
    """Return random weights of a family, of these base widths or the published ones."""
    if family == "wan2.1":
        return random_state_dict(width or WIDTHS[family])
    if family == "seedvr2":
        narrow = -(-(width or WIDTHS[family]) // 32) * 32  # 32 groups per norm
        return random_seedvr2([narrow * times for times in (1, 2, 4, 4)])
    encoder = width or WIDTHS[family]
    return random_wan22(encoder, decoder or encoder * 256 // 160)


def random_input(
    direction: str, family: str, frames: int, height: int, width: int, *, seed: int = 0
) -> Tensor:
    """Return frames `[1, 3, T, H, W]` in -1 to 1 to encode, or a latent of as many to decode."""
    generator = torch.Generator().manual_seed(seed)
    if direction == "encode":
        return torch.rand(1, 3, frames, height, width, generator=generator) * 2 - 1
    channels, step = (48, 16) if family == "wan2.2" else (16, 8)
    shape = (1, channels, (frames - 1) // 4 + 1, height // step, width // step)
    return torch.randn(shape, generator=generator)
