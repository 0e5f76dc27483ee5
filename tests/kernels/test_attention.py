"""Attention in blocks and by PyTorch: the formula, bounded memory, and which of them runs."""

import importlib
import math
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae import kernels
from fast_video_vae.kernels import use_backend
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import random

blocks = importlib.import_module("fast_video_vae.kernels.reference.attention")

NARROW = (torch.bfloat16, torch.float16)


@pytest.fixture
def mixed(monkeypatch):
    """Emulate 16-bit products with 32-bit results, which PyTorch has on CUDA only."""

    def baddbmm(_, a, b, dtype, *, beta, alpha, out):
        assert beta == 0
        assert a.dtype == b.dtype != dtype == out.dtype
        return out.copy_(a.to(dtype) @ b.to(dtype) * alpha)

    monkeypatch.setattr(torch, "baddbmm", baddbmm)
    monkeypatch.setattr(blocks, "multiplies_mixed", lambda *_: True)


def projection(batch, length, channels, dtype, seed=0):
    """Return queries, keys and values as thirds of one tensor, as a projection makes them."""
    return random(batch, length, 3 * channels, dtype=dtype, seed=seed).chunk(3, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *NARROW])
@pytest.mark.parametrize("length", [1, 33])  # one pixel, and one more than 32
def test_attention_in_blocks_equals_the_formula(dtype, length, monkeypatch, request):
    """Blocks hold rows of one frame, one frame, or several frames."""
    if dtype in NARROW:
        request.getfixturevalue("mixed")
    for elements, channels in product((1, 700, 20000), (16, 384)):
        monkeypatch.setattr(blocks, "_SCORE_ELEMENTS", elements)
        q, k, v = projection(3, length, channels, dtype)
        formulas.check(blocks.in_blocks(q, k, v), *formulas.attention(q, k, v))


@pytest.mark.usefixtures("mixed")
def test_small_weights_keep_their_precision():
    """The weights are about 2^-16, where float16 keeps only 8 bits."""
    length = 1 << 16
    q, k, v = torch.zeros(3, 1, length, 16, dtype=torch.float16)
    q[..., 0] = k[0, 0, 0] = v[0, 0, 0] = 1
    weight = blocks.in_blocks(q[:, :4], k, v)[0, 0, 0].item()
    expected = math.exp(0.25) / (math.exp(0.25) + length - 1)
    assert abs(weight / expected - 1) < torch.finfo(torch.float16).eps


class Largest(TorchDispatchMode):
    """Record the bytes of the largest result of any op, views excluded."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        aliases = any(returned.alias_info for returned in func._schema.returns)
        if isinstance(result, torch.Tensor) and not aliases:
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


@pytest.mark.parametrize("shape", [(1, 900, 16), (40, 100, 16)])
def test_the_memory_of_scores_is_bounded(shape, monkeypatch):
    elements = 200_000
    monkeypatch.setattr(blocks, "_SCORE_ELEMENTS", elements)
    q, k, v = projection(*shape, torch.bfloat16)
    with Largest() as largest:
        blocks.in_blocks(q, k, v)
    assert 4 * elements // 2 < largest.nbytes <= 4 * elements
    assert 4 * elements < 4 * shape[0] * shape[1] ** 2


def test_the_cpu_uses_the_flash_kernel_of_pytorch(monkeypatch):
    def fail(*_):
        raise AssertionError("scores are computed")

    monkeypatch.setattr(blocks, "in_blocks", fail)
    with use_backend("reference"):
        kernels.attention(*projection(1, 1000, 384, torch.bfloat16))


def test_attention_without_a_fused_kernel_runs_in_blocks(monkeypatch):
    """Devices other than CPUs and CUDA GPUs have no fused kernel."""
    monkeypatch.setattr(blocks, "_fused_attention_takes", lambda *_: False)
    monkeypatch.setattr(blocks, "_SCORE_ELEMENTS", 200)
    with use_backend("reference"):
        formulas.holds("attention", *random(3, 1, 50, 384))
