"""The matrix of ops and backends: it lists every op, with correct entries."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import SIGNATURES, backends
from fast_video_vae.kernels import support as matrix


@pytest.fixture(scope="module")
def entries():
    return matrix.backend_matrix()


def test_the_matrix_has_every_op_backend_and_dtype_once(entries):
    found = [(each.op, each.backend, each.dtype) for each in entries if each.device == "cpu"]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    lines = re.findall(r"^\| (`[^|]+`) \|", kernels.__doc__, flags=re.MULTILINE)
    ops = [op for line in lines for op in re.findall(r"`(\w+)`", line)]
    defined = [
        name
        for name in vars(kernels)
        if inspect.isfunction(getattr(kernels, name))
        and getattr(kernels, name).__module__ == kernels.__name__
    ]
    assert sorted(ops) == sorted(defined)
    assert sorted(ops) == sorted(SIGNATURES)
    assert found == [
        (op, name, dtype)
        for op in ops
        if op != "int8_conv3d"  # its input has none of these dtypes
        for name in (backends.CONVOLUTIONS if op.startswith("conv") else backends.ORDER)
        for dtype in dtypes
    ]


def test_unused_backends_are_not_built_or_imported():
    """Neither Triton, nor the builder, nor the run-time compiler of CUDA on a CPU."""
    code = (
        "import json, runpy, sys; runpy.run_path(sys.argv[1]); import einops, torch\n"
        "x = torch.ones(2, 8)\n"
        "einops.rearrange(x, 'a b -> b a')  # before PyTorch 2.8 it imports Triton\n"
        "before = set(sys.modules)\n"
        "from fast_video_vae import kernels\n"
        "from fast_video_vae.kernels import native_ops, use_backend\n"
        "untouched = native_ops.CPU._outcome is None\n"
        "kernels.silu_mul(x, x)\n"
        "refused = all('on cpu' in each.reason for each in kernels.backend_matrix()\n"
        "              if each.backend == 'triton' and each.device == 'cpu')\n"
        "try:\n"
        "    with use_backend('triton'): kernels.silu_mul(x, x)\n"
        "except kernels.BackendError as error: message = str(error)\n"
        "named = {'triton', 'torch.utils.cpp_extension'} & (set(sys.modules) - before)\n"
        "from fast_video_vae.kernels.cuda_ops import compiler\n"
        "loaded = compiler.compiler.cache_info().misses > 0\n"
        "print(json.dumps([untouched, loaded, refused, message, sorted(named)]))\n"
    )
    environment = {**os.environ, "FAST_VIDEO_VAE_NATIVE": "0", "TRITON_INTERPRET": "0"}
    conftest = Path(__file__).parents[1] / "conftest.py"
    done = subprocess.run(
        [sys.executable, "-c", code, conftest], capture_output=True, text=True, check=True,
        env=environment,
    )  # fmt: skip
    untouched, loaded, refused, message, imported = json.loads(done.stdout)
    assert untouched
    assert loaded == torch.cuda.is_available()
    assert refused
    reason = "triton: the tensors are on cpu; triton needs an NVIDIA, AMD or Intel GPU"
    assert message == f"no backend runs this silu_mul ({reason})"
    assert imported == ["triton"] * torch.cuda.is_available()
