"""FLOPs of a decode or an encode, counted by running the layers on the `meta` device."""

import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from fast_video_vae.kernels import use_backend
from fast_video_vae.tests.benchmarks.count_bytes import meta_input, meta_network
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.models.config import VAEConfig
from fast_video_vae.vae.streaming.executor import advance


@functools.cache
def video_flops(config: VAEConfig, direction: str, frames: int, height: int, width: int) -> float:
    """Count the FLOPs of this pack's network, two per product.

    The count is below that of the peers: upsampling is folded (4 taps of 9), and the first frame
    uses one temporal tap of three. All later latents cost the same, so one of them is counted.
    """
    network, cache = meta_network(config, direction), TemporalCache()
    counts = []
    for first in (True, False):
        cache.first = first
        x = meta_input(config, direction, 1, height, width, first=first)
        # The reference, so that no other backend is built or loaded.
        with torch.no_grad(), use_backend("reference"), FlopCounterMode(display=False) as counter:
            for _ in advance(network.chains(), x, cache, 1 << 62):
                pass
        counts.append(counter.get_total_flops())
    return float(counts[0] + (config.latent_frames(frames) - 1) * counts[1])
