"""What a step moves through memory, counted on tensors that have none."""

import pytest
import torch

from fast_video_vae.kernels import BackendError, silu_mul, use_backend
from fast_video_vae.tests.benchmarks import count_bytes

LIMIT_BYTES = 16 << 30

# Ops of one latent's frames: 25 to 31 convolutions, each with its norm and its sum; the passes that
# change the size; attention. Stock's chains take more than a thousand.
LAUNCHES = 110


@pytest.mark.parametrize("direction", ["decode", "encode"])
@pytest.mark.parametrize("family", ["wan2.1", "wan2.2"])
def test_a_step_moves_little_more_than_fused_passes_must(family, direction):
    try:
        with use_backend("native"):
            silu_mul(torch.empty(1, device="meta"), torch.empty(1, device="meta"))
    except BackendError as error:
        pytest.skip(f"each op is one pass with a fused backend alone: {error}")
    config = count_bytes.configs()[family]
    counter, latents = count_bytes.steady_step(config, direction, 720, 1280, LIMIT_BYTES)
    gigabytes = counter.total / latents / 1e9
    assert gigabytes <= 1.25 * count_bytes.NEEDED_GB[family, direction], counter.by_op
    assert counter.launches / latents <= LAUNCHES, counter.by_op
