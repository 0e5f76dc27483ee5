"""Random weights of the Wan 2.2 layout, and peers with these weights.

`from fast_video_vae.tests.wan22 import random_wan22`; `conftest.py` sets up that name.
"""

import re

import torch
from torch import Tensor

from fast_video_vae.tests.builders import diffusers_name, spread, wan_shapes


def random_wan22(
    encoder: int = 8, decoder: int = 8, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random weights of Wan 2.2 under the original names, well-behaved as `random_state_dict`'s."""
    shapes = wan_shapes(encoder, decoder, latents=48, channels=12, out_channels=12)
    return spread(shapes, dtype=dtype)


def random_qwen21(width: int = 8) -> dict[str, Tensor]:
    """Random weights of Qwen-Image 2.1 in its ComfyUI file's names."""
    given = {"channels": 4, "out_channels": 4, "multiples": (1, 2, 4, 8, 8), "taps": 1}
    return spread(wan_shapes(width, width, latents=64, **given))


def diffusers_wan22_name(name: str) -> str:
    """A tensor's name in diffusers' `AutoencoderKLWan` with `is_residual`, and in Qwen's 2.1."""
    stage = r"^{}\.{}\.(\d+)\.{}\.(\d+)\."
    down = re.match(stage.format("encoder", "downsamples", "downsamples"), name)
    up = re.match(stage.format("decoder", "upsamples", "upsamples"), name)
    match = down or up
    if match is None:
        return diffusers_name(name)
    sampler, last = ("downsampler", 2) if down else ("upsampler", 3)
    place = sampler if int(match[2]) == last else f"resnets.{match[2]}"
    side = "encoder.down_blocks" if down else "decoder.up_blocks"
    rest = diffusers_name(f"x.{name[match.end() :]}").removeprefix("x.")
    return f"{side}.{match[1]}.{place}.{rest}"
