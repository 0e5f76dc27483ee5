"""Features that only the reference has: float64, and blocks of any size."""

import importlib
import math

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import use_backend
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import DTYPES, OPS, inputs, random, video

memory = importlib.import_module("fast_video_vae.kernels.reference.memory")


@pytest.fixture(autouse=True)
def reference():
    with use_backend("reference"):
        yield


def test_float64_stays_float64():
    x, other = (video(2, 12, 3, 4, 6, dtype=torch.float64, seed=seed) for seed in (0, 1))
    weight, bias = random(2, 12, dtype=torch.float64, seed=2)
    for op, args, options in (
        ("rms_norm_silu", (x, weight), {"bias": bias}),
        ("group_norm_silu", (x, weight, bias, 3), {}),
        ("group_norm_statistics", (x, 3), {}),
        ("silu_mul", (x.movedim(1, -1), other.movedim(1, -1)), {}),
        ("bias_residual", (x, weight, other, bias), {}),
        ("attention", random(3, 2, 20, 8, dtype=torch.float64).unbind(), {}),
        ("average_down", (x, 6), {"times": 2, "size": 2}),
    ):
        actual = getattr(kernels, op)(*args, **options)
        value, error = getattr(formulas, op)(*args, **options)
        assert actual.dtype == torch.float64
        formulas.check(actual, value, 2 * error)  # the formula is computed in float64 too


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("op", sorted(set(OPS) - {"attention"}))
def test_blocks_do_not_change_a_result(op, dtype, monkeypatch):
    args, keywords = inputs(op, dtype)
    expected = getattr(kernels, op)(*args, **keywords)
    for elements in (1, 100, 1000):  # less than a row, than several rows, than a frame
        monkeypatch.setattr(memory, "_BLOCK_ELEMENTS", elements)
        args, keywords = inputs(op, dtype)
        actual = getattr(kernels, op)(*args, **keywords)
        if op in ("group_norm_silu", "group_norm_statistics", "rms_norm_silu", "silu_mul"):
            # The order of sums differs, and `exp` differs between vectors and their remainder.
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(actual, expected, rtol=2 * eps, atol=2e-6)
        else:
            assert torch.equal(actual, expected)


def test_blocks_cover_every_number_once(monkeypatch):
    monkeypatch.setattr(memory, "_BLOCK_ELEMENTS", 50)
    for shape in ((3, 5, 7, 4), (1, 1, 40, 4), (2, 100), (1, 60), (5,), (0, 4), (6, 1, 1, 1)):
        x = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        parts = [part.clone() for part in memory.copies(x, torch.float32)]
        assert torch.equal(torch.cat([part.flatten() for part in [*parts, x[:0]]]), x.flatten())
        assert all(part.numel() <= max(50, shape[-1]) for part in parts)
