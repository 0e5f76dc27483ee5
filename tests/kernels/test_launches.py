"""The launches of the GPU backends, and their bytes, counted on tensors of the `meta` device."""

import pytest
import torch

pytest.importorskip("triton", reason="the launches need triton")

from fast_video_vae.tests.benchmarks import count_bytes

LIMIT_BYTES = 16 << 30

STEPS = [
    (family, direction)
    for family in ("wan2.1", "wan2.2", "seedvr2")
    for direction in ("decode", "encode")
]

mixed_products = pytest.mark.skipif(
    "out_dtype" not in (torch.bmm.__doc__ or ""),
    reason="products of 16-bit tensors in float32 need PyTorch 2.8",
)

# Launches per latent of a steady decode of Wan 2.1, those of the convolutions included.
MOST = 79

# The partial sums of a group norm are a tenth of a percent of its bytes, and their number differs.
APART = 1e-3


def step(family, direction, backend, *, attends=False):
    config = count_bytes.configs()[family]
    return count_bytes.steady_step(
        config, direction, 720, 1280, LIMIT_BYTES, backend=backend, attends=attends
    )


@pytest.mark.parametrize(
    ("family", "direction"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case == ("seedvr2", "decode") else ())
        for case in STEPS
    ],
)
def test_cuda_launches_and_moves_no_more_than_triton(family, direction):
    counters = {name: step(family, direction, name)[0] for name in ("triton", "cuda")}
    triton, cuda = counters.values()
    assert cuda.launches <= triton.launches
    assert cuda.passes <= triton.passes * (1 + APART)
    assert cuda.by_op.keys() == triton.by_op.keys()
    for op in cuda.by_op:
        if op != "combination of group norm":
            assert cuda.by_op[op] == pytest.approx(triton.by_op[op], rel=0.01), op


@mixed_products
def test_a_step_stays_within_its_launches_with_attention_in_blocks():
    counter, latents = step("wan2.1", "decode", "cuda", attends=True)
    assert counter.launches / latents <= MOST
