"""The memory traffic of a step, counted on tensors of the `meta` device."""

import pytest
import torch

from fast_video_vae.kernels import BackendError, silu_mul, use_backend
from fast_video_vae.tests.benchmarks import count_bytes

LIMIT_BYTES = 16 << 30

# Kernel launches per latent: 25 to 31 convolutions, each with a norm and a sum; the passes that
# change the size; attention, in steps of four latents. The stock implementation needs more than a
# thousand.
LAUNCHES = 110


@pytest.fixture(autouse=True)
def _fused():
    try:
        with use_backend("native"):
            silu_mul(torch.empty(1, device="meta"), torch.empty(1, device="meta"))
    except BackendError as error:
        pytest.skip(f"an op is one pass only with a fused backend: {error}")


@pytest.mark.parametrize(("family", "direction"), [("wan2.1", "encode"), ("wan2.2", "decode")])
def test_the_traffic_of_a_step_is_near_the_minimum(family, direction):
    config = count_bytes.configs()[family]
    step = config, direction, 720, 1280, LIMIT_BYTES
    counter, latents = count_bytes.steady_step(*step)
    gigabytes = counter.total / latents / 1e9
    assert gigabytes <= 1.25 * count_bytes.NEEDED_GB[family, direction], counter.by_op
    counter, latents = count_bytes.steady_step(*step, 4)
    assert counter.launches / latents <= LAUNCHES, counter.by_op
