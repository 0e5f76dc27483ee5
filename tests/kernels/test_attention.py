"""Attention in blocks and in Triton: the formula, memory that does not grow, chips that take it."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, use_backend
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import missing, random

blocks = importlib.import_module("fast_video_vae.kernels.reference.attention")

NARROW = (torch.bfloat16, torch.float16)

# Around a block of keys, and of queries; a lone pixel.
LENGTHS = (1, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 31, 32, 65, 100)))


@pytest.fixture
def mixed(monkeypatch):
    """Products of 16 bits with results in 32, which only CUDA has, from a stand-in."""

    def baddbmm(_, a, b, dtype, *, beta, alpha, out):
        assert beta == 0
        assert a.dtype == b.dtype != dtype == out.dtype
        return out.copy_(a.to(dtype) @ b.to(dtype) * alpha)

    monkeypatch.setattr(torch, "baddbmm", baddbmm)
    monkeypatch.setattr(blocks, "_multiplies_mixed", lambda *_: True)


def projection(batch, length, channels, dtype, seed=0):
    """Queries, keys and values as a projection makes them: thirds of one tensor."""
    return random(batch, length, 3 * channels, dtype=dtype, seed=seed).chunk(3, -1)


def check(actual, q, k, v):
    formulas.check(actual, *formulas.attention(q, k, v), f"{tuple(q.shape)} {q.dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *NARROW])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("elements", [1, 700, 20000])
def test_blocks_are_the_formula(dtype, length, elements, monkeypatch):
    """Rows of one frame, whole frames, several at a time."""
    monkeypatch.setattr(blocks, "_SCORE_ELEMENTS", elements)
    for channels in (16, 48, 384):
        q, k, v = projection(3, length, channels, dtype)
        check(blocks._in_blocks(q, k, v), q, k, v)


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("elements", [1, 700, 20000])
def test_blocks_of_mixed_products_are_the_formula(dtype, length, elements, monkeypatch):
    monkeypatch.setattr(blocks, "_SCORE_ELEMENTS", elements)
    for channels in (16, 384):
        q, k, v = projection(3, length, channels, dtype)
        check(blocks._in_blocks(q, k, v), q, k, v)


@pytest.mark.usefixtures("mixed")
def test_the_weights_of_many_pixels_keep_their_bits():
    """Weights are about 2^-16 here, of which float16 has 8 bits."""
    length = 1 << 16
    q, k, v = torch.zeros(3, 1, length, 16, dtype=torch.float16)
    q[..., 0] = k[0, 0, 0] = v[0, 0, 0] = 1
    weight = blocks._attend(q[:, :4], k.mT, v, 0.25, mixed=True)[0, 0, 0].item()
    expected = math.exp(0.25) / (math.exp(0.25) + length - 1)
    assert abs(weight / expected - 1) < torch.finfo(torch.float16).eps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="mixed products need a CUDA device")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("length", [100, 5000])
def test_blocks_on_a_gpu_are_the_formula(dtype, length):
    q, k, v = (x.cuda() for x in projection(2, length, 384, dtype))
    assert blocks._multiplies_mixed(q, k, v)
    check(blocks._in_blocks(q, k, v), q, k, v)


class Largest(TorchDispatchMode):
    """The bytes of the largest result of any op, views left out."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        aliases = any(returned.alias_info for returned in func._schema.returns)
        if isinstance(result, torch.Tensor) and not aliases:
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3000, 16), (5, 600, 16), (40, 100, 16)])
def test_the_scores_stay_within_their_bound(dtype, shape, monkeypatch):
    elements = 200_000
    monkeypatch.setattr(blocks, "_SCORE_ELEMENTS", elements)
    q, k, v = projection(*shape, dtype)
    with Largest() as largest:
        blocks._in_blocks(q, k, v)
    assert 4 * elements // 2 < largest.nbytes <= 4 * elements
    assert 4 * elements < 4 * shape[0] * shape[1] ** 2


def test_gradients_go_through_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "_SCORE_ELEMENTS", 60)
    q, k, v = (x.clone().requires_grad_() for x in projection(2, 9, 4, torch.float64))
    assert torch.autograd.gradcheck(blocks._in_blocks, (q, k, v))


def test_on_a_cpu_its_flash_kernel_serves(monkeypatch):
    def fail(*_):
        raise AssertionError("scores are made")

    monkeypatch.setattr(blocks, "_in_blocks", fail)
    with use_backend("reference"):
        kernels.attention(*projection(1, 5000, 384, torch.bfloat16))


@pytest.fixture
def in_triton(monkeypatch):
    """Triton's attention, for narrow heads too."""
    reason = missing("triton")
    if reason:
        pytest.skip(reason)
    module = importlib.import_module("fast_video_vae.kernels.triton_ops.attention")
    monkeypatch.setattr(module, "_FLASH_HEAD", 0)
    with use_backend("triton"):
        yield module


@pytest.fixture(scope="module")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("channels", [16, 48, 96, 112, 384])  # 1 to 3 parts
def test_triton_is_the_formula(dtype, length, channels, device):
    q, k, v = (x.to(device) for x in projection(2, length, channels, dtype))
    actual = kernels.attention(q, k, v)
    assert actual.is_contiguous()
    check(actual.cpu(), q.cpu(), k.cpu(), v.cpu())


@pytest.mark.usefixtures("in_triton")
def test_triton_takes_rows_anywhere(device):
    """Thirds of one tensor, every second pixel, frames in another order."""
    whole = random(3, 40, 3 * 32, dtype=torch.bfloat16).to(device)
    for view in (whole, whole[:, ::2], whole[::2, 3:], whole.transpose(0, 1)):
        q, k, v = view.chunk(3, -1)
        check(kernels.attention(q, k, v).cpu(), q.cpu(), k.cpu(), v.cpu())
    q, k, v = whole.chunk(3, -1)
    actual = kernels.attention(q.contiguous(), k, v[:1].expand(3, -1, -1))
    check(actual.cpu(), q.cpu(), k.cpu(), v[:1].expand(3, -1, -1).cpu())


@pytest.mark.usefixtures("in_triton")
def test_triton_keeps_large_scores_apart(device):
    """Scores of some hundreds, whose powers are beyond float32; the largest comes last."""
    q, k, v = (x.to(device) for x in projection(1, 70, 32, torch.float16))
    k = k * torch.linspace(1, 60, 70, device=device).half()[:, None]
    check(kernels.attention(q, k, v).cpu(), q.cpu(), k.cpu(), v.cpu())


def refusals(device):
    good = random(1, 4, 3 * 32, dtype=torch.bfloat16).to(device).chunk(3, -1)
    wide = random(3, 1, 4, 32).to(device)
    return {
        "float32": wide.unbind(),
        "heads of 24": random(3, 1, 4, 24, dtype=torch.bfloat16).to(device).unbind(),
        "heads of 480": random(3, 1, 4, 480, dtype=torch.bfloat16).to(device).unbind(),
        "not dense": [x.mT.contiguous().mT for x in good],
        "gradient": [x.clone().requires_grad_() for x in good],
    }


@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("reason", refusals("cpu"))
def test_triton_says_what_it_does_not_take(reason, device):
    with pytest.raises(BackendError, match=reason):
        kernels.attention(*refusals(device)[reason])


def test_triton_does_not_compete_with_flash_kernels(in_triton, device):
    in_triton._FLASH_HEAD = 256  # put back by the fixture
    q = torch.ones(1, 4, 256, dtype=torch.bfloat16, device=device)
    with pytest.raises(BackendError, match="256"):
        kernels.attention(q, q, q)


@pytest.mark.parametrize(
    ("channels", "parts"),
    [
        (16, (16, 0, 0)),
        (96, (64, 32, 0)),
        (384, (256, 128, 0)),
        (448, (256, 128, 64)),
        (512, (512, 0, 0)),
        (640, (512, 128, 0)),
        (1024, (512, 512, 0)),
    ],
)
def test_a_head_is_a_sum_of_powers_of_two(in_triton, channels, parts):
    assert in_triton.head_parts(channels) == parts
    for channels in (8, 24, 100, 240, 2048):
        with pytest.raises(Refusal, match=f"heads of {channels}"):
            in_triton.head_parts(channels)


# Compiles for chips that are not here: registers, memory on the stack (spills), shared memory.
_COMPILE = """
import importlib, json, re, runpy, subprocess, sys, tempfile
from pathlib import Path

runpy.run_path(sys.argv[1])
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module = importlib.import_module("fast_video_vae.kernels.triton_ops.attention")
kernel, tool = module._flash, Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
for job in sys.argv[2:]:
    chip, channels, even, dtype = job.split(",")
    chip, channels = int(chip), int(channels)
    tile = module.tile_of(divmod(chip, 10), channels)
    constants = dict(zip(("PART_0", "PART_1", "PART_2"), module.head_parts(channels)))
    constants |= {"QUERIES": tile.queries, "KEYS": tile.keys, "EVEN": bool(int(even))}
    tensors, strides = ("q", "k", "v", "out"), ("_row", "_frame")
    types = {name: "i32" for name in kernel.arg_names} | {"scale": "fp32"}
    types |= {name: f"*{dtype}" for name in tensors} | dict.fromkeys(constants, "constexpr")
    sixteens = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(kernel.arg_names)
        if name in tensors or name.endswith(strides)
    }
    compiled = triton.compile(
        ASTSource(kernel, types, constants, sixteens),
        target=GPUTarget("cuda", chip, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        text = subprocess.run(
            [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\\d+) STACK:(\\d+)", text).groups()
    print(json.dumps([job, int(registers), int(stack), compiled.metadata.shared]), flush=True)
"""

# Shared memory that a program may have, in KiB.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


def compiled(jobs):
    """Registers, bytes on the stack and of shared memory of each, without the interpreter."""
    pytest.importorskip("triton", reason="compiling needs triton")
    conftest = str(Path(__file__).parents[1] / "conftest.py")
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE, conftest, *jobs],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert result.returncode == 0, result.stderr
    return {job: numbers for job, *numbers in map(json.loads, result.stdout.splitlines())}


def check_resources(jobs):
    results = compiled(jobs)
    assert set(results) == set(jobs)
    for job, (_, stack, shared) in results.items():
        assert stack == 0, f"{job} spills"
        assert shared <= SHARED[int(job.split(",")[0])] << 10, job


@pytest.mark.slow
@pytest.mark.parametrize("chip", SHARED)
def test_every_head_compiles_for_every_chip_that_takes_it(chip, in_triton):
    """The widest of each tile, pixels that fill the last block of keys and such that do not."""
    widest = in_triton._TILES.get(divmod(chip, 10), in_triton._TILES_OF_OTHERS)
    jobs = [f"{chip},{channels},{even},bf16" for channels in widest for even in (0, 1)]
    check_resources([*jobs, f"{chip},384,1,fp16"])


def test_a_chip_takes_the_heads_that_it_has_tiles_for(in_triton):
    for capability in ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)):
        assert in_triton.tile_of(capability, 384).warps == 8
    assert in_triton.tile_of((8, 9), 272) == in_triton.tile_of((8, 9), 384)
    with pytest.raises(Refusal, match="heads above 384"):
        in_triton.tile_of((9, 0), 640)
    with pytest.raises(Refusal, match=r"compute capability is 7\.5"):
        in_triton.tile_of((7, 5), 384)
