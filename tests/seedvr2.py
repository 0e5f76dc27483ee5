"""Random weights of SeedVR2's layout, and ComfyUI's VAE with narrow ones.

`from fast_video_vae.tests.seedvr2 import random_seedvr2`; `conftest.py` sets up that name.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fast_video_vae.tests.builders import Shapes, spread

# Widths of the stages, full size first: as published, and the narrowest for norms with 32 groups
# and a stage of each kind.
WIDTHS = (128, 256, 512, 512)
NARROW = (32, 64, 96, 96)


def seedvr2_shapes(widths: Sequence[int] = WIDTHS) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, as in `ema_vae_fp16.safetensors`.

    Written from models/video_vae_v3/s8_c16_t4_inflation_sd3.yaml and attn_video_vae.py of SeedVR.
    Widths are those of the stages, full size first.
    """
    shapes = Shapes()
    conv = shapes.conv

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    def residual(name: str, into: int, out: int) -> None:
        norm(f"{name}.norm1", into)
        conv(f"{name}.conv1", out, into, 3, 3, 3)
        norm(f"{name}.norm2", out)
        conv(f"{name}.conv2", out, out, 3, 3, 3)
        if into != out:
            conv(f"{name}.conv_shortcut", out, into, 1, 1, 1)

    def middle(name: str, width: int) -> None:
        residual(f"{name}.resnets.0", width, width)
        norm(f"{name}.attentions.0.group_norm", width)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            conv(f"{name}.attentions.0.{part}", width, width)
        residual(f"{name}.resnets.1", width, width)

    last = len(widths) - 1
    before = widths[0]
    conv("encoder.conv_in", before, 3, 3, 3, 3)
    for stage, width in enumerate(widths):
        for index in range(2):
            name = f"encoder.down_blocks.{stage}.resnets.{index}"
            residual(name, width if index else before, width)
        if stage < last:
            taps = 3 if stage else 1  # the first reduces only the size, not the number of frames
            conv(f"encoder.down_blocks.{stage}.downsamplers.0.conv", width, width, taps, 3, 3)
        before = width
    middle("encoder.mid_block", before)
    norm("encoder.conv_norm_out", before)
    conv("encoder.conv_out", 32, before, 3, 3, 3)

    conv("decoder.conv_in", before, 16, 3, 3, 3)
    middle("decoder.mid_block", before)
    for stage, width in enumerate(widths[::-1]):
        for index in range(3):
            name = f"decoder.up_blocks.{stage}.resnets.{index}"
            residual(name, width if index else before, width)
        if stage < last:
            name = f"decoder.up_blocks.{stage}.upsamplers.0"
            growth = 8 if stage < 2 else 4  # the last keeps the number of frames
            conv(f"{name}.upscale_conv", growth * width, width, 1, 1, 1)
            conv(f"{name}.conv", width, width, 3, 3, 3)
        before = width
    norm("decoder.conv_norm_out", before)
    conv("decoder.conv_out", 3, before, 3, 3, 3)
    return shapes


def random_seedvr2(
    widths: Sequence[int] = NARROW, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random weights under the original names, well-behaved as `random_state_dict`'s."""
    return spread(seedvr2_shapes(widths), dtype=dtype)
