"""FLOPs of a decode or an encode, counted from our layers on the `meta` device."""

import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from fast_video_vae.kernels import use_backend
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.layers.workspace import canonical
from fast_video_vae.vae.models.build import make_decoder, make_encoder
from fast_video_vae.vae.models.config import VAEConfig
from fast_video_vae.vae.streaming.executor import advance


@functools.cache
def video_flops(config: VAEConfig, direction: str, frames: int, height: int, width: int) -> float:
    """Count what our network multiplies and adds.

    Upsampling is folded (4 taps of 9) and the first frame meets one temporal tap of three, so that
    it is less than what the peers do. The frames after the first cost alike, so one latent of them
    is counted.

    Args:
        config: What the weights are.
        direction: "decode" or "encode".
        frames: Of the video.
        height: Of its frames.
        width: Likewise.

    Returns:
        FLOPs, two for each product.
    """
    make = make_decoder if direction == "decode" else make_encoder
    network = make(config).to("meta", torch.bfloat16).requires_grad_(False)
    cache = TemporalCache()
    counts = []
    for first in (True, False):
        cache.first = first
        x = torch.empty(_shape(config, direction, first, height, width), device="meta")
        x = canonical(x.to(torch.bfloat16).movedim(-1, 1))
        # The reference, so that no other backend is built or loaded for it.
        with torch.no_grad(), use_backend("reference"), FlopCounterMode(display=False) as counter:
            for _ in advance(network.chains(), x, cache, 1 << 62):
                pass
        counts.append(counter.get_total_flops())
    return float(counts[0] + (config.latent_frames(frames) - 1) * counts[1])


def _shape(
    config: VAEConfig, direction: str, first: bool, height: int, width: int
) -> tuple[int, ...]:
    """Of what enters the network, channels last: the first frame, or one latent more."""
    if direction == "decode":
        step = config.spatial_compression
        return 1, 1, height // step, width // step, config.latent_channels
    patch = config.patch_size
    frames = 1 if first else config.temporal_compression
    return 1, frames, height // patch, width // patch, config.image_channels * patch**2
