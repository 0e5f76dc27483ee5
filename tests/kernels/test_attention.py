"""Attention in blocks and in Triton: the formula, bounded memory, and the supported chips."""

import importlib
import math
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, use_backend
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import random

blocks = importlib.import_module("fast_video_vae.kernels.reference.attention")

NARROW = (torch.bfloat16, torch.float16)

# One pixel, and lengths around a block of keys and of queries.
LENGTHS = (1, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (31, 32, 100)))


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


def check(actual, q, k, v):
    formulas.check(actual, *formulas.attention(q, k, v), f"{tuple(q.shape)} {q.dtype}")


@pytest.mark.parametrize(
    ("dtype", "products"),
    [
        *((dtype, "plain") for dtype in (torch.float32, torch.float64, *NARROW)),
        *((dtype, "mixed") for dtype in NARROW),
    ],
)
@pytest.mark.parametrize("length", LENGTHS)
def test_attention_in_blocks_equals_the_formula(dtype, products, length, monkeypatch, request):
    """Blocks hold rows of one frame, one frame, or several frames."""
    if products == "mixed":
        request.getfixturevalue("mixed")
    for elements, channels in product((1, 700, 20000), (16, 384)):
        monkeypatch.setattr(blocks, "_SCORE_ELEMENTS", elements)
        q, k, v = projection(3, length, channels, dtype)
        check(blocks.in_blocks(q, k, v), q, k, v)


@pytest.mark.usefixtures("mixed")
def test_small_weights_keep_their_precision():
    """The weights are about 2^-16, where float16 keeps only 8 bits."""
    length = 1 << 16
    q, k, v = torch.zeros(3, 1, length, 16, dtype=torch.float16)
    q[..., 0] = k[0, 0, 0] = v[0, 0, 0] = 1
    weight = blocks.in_blocks(q[:, :4], k, v)[0, 0, 0].item()
    expected = math.exp(0.25) / (math.exp(0.25) + length - 1)
    assert abs(weight / expected - 1) < torch.finfo(torch.float16).eps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="mixed products need a CUDA device")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("length", [100, 5000])
def test_attention_in_blocks_on_a_gpu_equals_the_formula(dtype, length):
    q, k, v = (x.cuda() for x in projection(2, length, 384, dtype))
    assert blocks.multiplies_mixed(q, k, v)
    check(blocks.in_blocks(q, k, v), q, k, v)


class Largest(TorchDispatchMode):
    """Record the bytes of the largest result of any op, views excluded."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        aliases = any(returned.alias_info for returned in func._schema.returns)
        if isinstance(result, torch.Tensor) and not aliases:
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3000, 16), (5, 600, 16), (40, 100, 16)])
def test_the_memory_of_scores_is_bounded(dtype, shape, monkeypatch):
    elements = 200_000
    monkeypatch.setattr(blocks, "_SCORE_ELEMENTS", elements)
    q, k, v = projection(*shape, dtype)
    with Largest() as largest:
        blocks.in_blocks(q, k, v)
    assert 4 * elements // 2 < largest.nbytes <= 4 * elements
    assert 4 * elements < 4 * shape[0] * shape[1] ** 2


def test_the_cpu_uses_the_flash_kernel_of_pytorch(monkeypatch):
    def fail(*_):
        raise AssertionError("scores are computed")

    monkeypatch.setattr(blocks, "in_blocks", fail)
    with use_backend("reference"):
        kernels.attention(*projection(1, 5000, 384, torch.bfloat16))


@pytest.fixture
def in_triton(on_triton, monkeypatch):
    """Return the module of Triton's attention, enabled for narrow heads too."""
    module = importlib.import_module("fast_video_vae.kernels.triton_ops.attention")
    monkeypatch.setattr(module, "FLASH_HEAD", 0)
    with use_backend("triton"):
        yield module


@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("channels", [16, 48, 384])  # 1 and 2 parts
def test_triton_equals_the_formula(dtype, length, channels):
    q, k, v = projection(2, length, channels, dtype)
    actual = kernels.attention(q, k, v)
    assert actual.is_contiguous()
    check(actual, q, k, v)


@pytest.mark.usefixtures("in_triton")
def test_triton_reads_rows_at_any_stride():
    """Rows are thirds of one tensor, every second pixel, or frames in another order."""
    whole = random(3, 40, 3 * 32, dtype=torch.bfloat16)
    for view in (whole, whole[:, ::2], whole[::2, 3:], whole.transpose(0, 1)):
        q, k, v = view.chunk(3, -1)
        check(kernels.attention(q, k, v), q, k, v)
    q, k, v = whole.chunk(3, -1)
    same = v[:1].expand(3, -1, -1)
    check(kernels.attention(q.contiguous(), k, same), q, k, same)
    # Scores of some hundreds, whose exponentials overflow float32; the largest comes last.
    q, k, v = projection(1, 70, 32, torch.float16)
    k = k * torch.linspace(1, 60, 70).half()[:, None]
    check(kernels.attention(q, k, v), q, k, v)


def test_triton_refuses_with_a_reason(in_triton):
    good = projection(1, 4, 32, torch.bfloat16)
    for reason, call in {
        "float32": projection(1, 4, 32, torch.float32),
        "a head of 24": projection(1, 4, 24, torch.bfloat16),
        "a head of 480": projection(1, 4, 480, torch.bfloat16),
        "not dense": [x.mT.contiguous().mT for x in good],
    }.items():
        with pytest.raises(BackendError, match=reason):
            kernels.attention(*call)
    in_triton.FLASH_HEAD = 256  # put back by the fixture; flash kernels serve these heads
    q = torch.ones(1, 4, 256, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match="256"):
        kernels.attention(q, q, q)


def test_a_head_is_a_sum_of_powers_of_two(in_triton):
    for channels, parts in {
        16: (16, 0),
        96: (64, 32),
        384: (256, 128),
        512: (512, 0),
        640: (512, 128),
        1024: (512, 512),
    }.items():
        assert in_triton.head_parts(channels) == parts
    for channels in (8, 24, 100, 240, 448, 1040, 2048):
        with pytest.raises(Refusal, match=f"a head of {channels}"):
            in_triton.head_parts(channels)


def test_a_chip_refuses_heads_without_tiles(in_triton):
    for capability in ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)):
        assert in_triton.tile_of(capability, 384).warps == 8
    assert in_triton.tile_of((8, 9), 272) == in_triton.tile_of((8, 9), 384)
    with pytest.raises(Refusal, match="heads above 384"):
        in_triton.tile_of((9, 0), 640)
    with pytest.raises(Refusal, match=r"compute capability is 7\.5"):
        in_triton.tile_of((7, 5), 384)
    assert in_triton.tile_of("gfx942", 384) == in_triton.tile_of("gfx950", 640)
    with pytest.raises(Refusal, match="heads above 512"):
        in_triton.tile_of("gfx1100", 640)
    with pytest.raises(Refusal, match="no tiles for gfx1030; expected gfx9, gfx11, gfx12"):
        in_triton.tile_of("gfx1030", 384)


def test_attention_without_a_fused_kernel_runs_in_blocks(monkeypatch):
    """Devices other than CPUs and CUDA GPUs have no fused kernel."""
    monkeypatch.setattr(blocks, "_fused_attention_takes", lambda *_: False)
    monkeypatch.setattr(blocks, "_SCORE_ELEMENTS", 200)
    with use_backend("reference"):
        formulas.holds("attention", *random(3, 1, 50, 384))
