"""Random weights of the Wan 2.2 layout, and the peers that hold them.

`from fast_video_vae.tests.wan22 import random_wan22`; `conftest.py` makes that name.
"""

import re

import torch
from torch import Tensor

from fast_video_vae.tests.builders import Shapes, diffusers_name, spread

WAN22 = (1, 2, 4, 4)
QWEN21 = (1, 2, 4, 8, 8)


def wan22_shapes(
    encoder: int = 160,
    decoder: int = 256,
    *,
    latents: int = 48,
    channels: int = 12,
    multiples: tuple[int, ...] = WAN22,
    taps: int = 3,
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, as in `Wan2.2_VAE.pth`.

    Args:
        encoder: Base width of the encoder: 160 in Wan 2.2, 96 in Qwen-Image 2.1.
        decoder: Base width of the decoder: 256, 144.
        latents: Channels of the latent: 48, 64.
        channels: Channels that the networks see of a frame: 12 (patches of 3), 4.
        multiples: Widths of the stages over the base width.
        taps: Frames that a convolution sees: 3, 1.
    """
    shapes = Shapes(taps)
    conv, residual = shapes.conv, shapes.residual
    stages = len(multiples)
    widths = [encoder * each for each in (1, *multiples)]
    conv("encoder.conv1", widths[0], channels, taps, 3, 3)
    for i in range(stages):
        name = f"encoder.downsamples.{i}.downsamples"
        residual(f"{name}.0", widths[i], widths[i + 1])
        residual(f"{name}.1", widths[i + 1], widths[i + 1])
        if i < stages - 1:
            conv(f"{name}.2.resample.1", widths[i + 1], widths[i + 1], 3, 3)
            if i:
                conv(f"{name}.2.time_conv", widths[i + 1], widths[i + 1], taps, 1, 1)
    shapes.middle("encoder.middle", widths[-1])
    shapes.head("encoder.head", widths[-1], 2 * latents)
    conv("conv1", 2 * latents, 2 * latents, 1, 1, 1)
    conv("conv2", latents, latents, 1, 1, 1)
    widths = [decoder * each for each in (multiples[-1], *multiples[::-1])]
    conv("decoder.conv1", widths[0], latents, taps, 3, 3)
    for i in range(stages):
        name = f"decoder.upsamples.{i}.upsamples"
        for j in range(3):
            residual(f"{name}.{j}", widths[i] if j == 0 else widths[i + 1], widths[i + 1])
        if i < stages - 1:
            conv(f"{name}.3.resample.1", widths[i + 1], widths[i + 1], 3, 3)
            if i < stages - 2:
                conv(f"{name}.3.time_conv", 2 * widths[i + 1], widths[i + 1], taps, 1, 1)
    shapes.middle("decoder.middle", widths[0])
    shapes.head("decoder.head", widths[-1], channels)
    return shapes


def random_wan22(
    encoder: int = 8, decoder: int = 8, *, seed: int = 0, dtype: torch.dtype = torch.float32,
    **shape: object,
) -> dict[str, Tensor]:  # fmt: skip
    """Random weights of Wan 2.2 under the original names, well-behaved as `random_state_dict`'s."""
    return spread(wan22_shapes(encoder, decoder, **shape), seed, dtype)


def random_qwen21(encoder: int = 8, decoder: int = 8, *, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of Qwen-Image 2.1 in its ComfyUI file's names."""
    shape = {"latents": 64, "channels": 4, "multiples": QWEN21, "taps": 1}
    return random_wan22(encoder, decoder, seed=seed, **shape)


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
