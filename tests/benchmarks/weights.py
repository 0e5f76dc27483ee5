"""Random weights of the families, in the published widths or others."""

import torch
from torch import Tensor

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.wan22 import random_wan22

# Base width of the encoder; the decoder of Wan 2.2 is wider.
WIDTHS = {"wan2.1": 96, "wan2.2": 160, "seedvr2": 128}


def random_weights(
    family: str,
    width: int | None = None,
    decoder: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return random weights of `family`.

    Args:
        family: "wan2.1", "wan2.2" or "seedvr2".
        width: Base width of the encoder; None: as published.
        decoder: Base width of Wan 2.2's decoder; None: in the published proportion to `width`.
        dtype: Dtype of Wan 2.2 and SeedVR2; Wan 2.1 is float32.
    """
    if family == "wan2.1":
        return random_state_dict(width or WIDTHS[family])
    if family == "seedvr2":
        narrow = -(-(width or WIDTHS[family]) // 32) * 32  # 32 groups per norm
        return random_seedvr2([narrow * times for times in (1, 2, 4, 4)], dtype=dtype)
    encoder = width or WIDTHS[family]
    return random_wan22(encoder, decoder or encoder * 256 // 160, dtype=dtype)
