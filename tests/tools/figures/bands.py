"""The speed-up that bands are expected to give, from the products of each layer."""

from dataclasses import replace

import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.models.wan21 import Wan21Decoder
from fast_video_vae.vae.planning.division import Division
from fast_video_vae.vae.planning.job import job_of
from fast_video_vae.vae.planning.tiling import band_cuts

_LATENT = 90, 160  # 720 x 1280 pixels
_WIDTHS = 384, 384, 384, 192, 96  # of the published decoder


def speed_up(count: int, *, columns: bool, after_attention: bool) -> float:
    """Return the speed-up of `count` equal devices over one, for a decode by Wan 2.1."""
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    with torch.device("meta"):
        decoder = Wan21Decoder(_WIDTHS, 3, 16)
    cpu, size = torch.device("cpu"), (1, *_LATENT)
    small = job_of(vae.decoder, vae.config, size, torch.float32, cpu, single_frame=False)
    job = replace(small, network=decoder)
    *_, tiled, attended = band_cuts(decoder)
    division = Division(job, attended if after_attention else tiled, int(columns))
    spans = division.balanced(dict.fromkeys(range(count), 1.0), 0)
    slowest = max(division.work(*span) for span in spans.values())
    return division.work(0, division.length) / slowest
