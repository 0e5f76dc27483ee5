"""The matrix of ops and backends: it lists every op, with correct entries."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import SIGNATURES, backends
from fast_video_vae.tests.kernels.cases import DTYPES


def test_the_matrix_has_every_op_backend_and_dtype_once():
    entries = kernels.backend_matrix()
    found = [(each.op, each.backend, each.dtype) for each in entries if each.device == "cpu"]
    lines = re.findall(r"^\| (`[^|]+`) \|", kernels.__doc__, flags=re.MULTILINE)
    ops = [op for line in lines for op in re.findall(r"`(\w+)`", line)]
    functions = inspect.getmembers(kernels, inspect.isfunction)
    defined = [name for name, each in functions if each.__module__ == kernels.__name__]
    assert sorted(ops) == sorted(defined)
    assert sorted(ops) == sorted(SIGNATURES)
    assert found == [
        (op, name, dtype)
        for op in ops
        if op != "int8_conv3d"  # its input has none of these dtypes
        for name in (backends.CONVOLUTIONS if op.startswith("conv") else backends.ORDER)
        for dtype in DTYPES
    ]


CALL = """
import runpy, sys; runpy.run_path(sys.argv[1]); import einops, torch
x = torch.ones(2, 8)
einops.rearrange(x, "a b -> b a")  # before PyTorch 2.8 it imports Triton
before = set(sys.modules)
from fast_video_vae import kernels
from fast_video_vae.kernels import native_ops
print(native_ops.CPU._outcome)
kernels.silu_mul(x, x)
matrix = kernels.backend_matrix()
print({each.reason for each in matrix if (each.backend, each.device) == ("triton", "cpu")})
print({"triton", "torch.utils.cpp_extension"} & (set(sys.modules) - before))
from fast_video_vae.kernels.cuda_ops import compiler
print(compiler.compiler.cache_info().misses)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU uses them")
def test_unused_backends_are_not_built_or_imported():
    """Neither Triton, nor the builder, nor the run-time compiler of CUDA on a CPU."""
    environment = {**os.environ, "FAST_VIDEO_VAE_NATIVE": "0", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", CALL, Path(__file__).parents[1] / "conftest.py"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    reason = "the tensors are on cpu; triton needs an NVIDIA, AMD or Intel GPU"
    assert text.stdout.splitlines() == ["None", str({reason}), "set()", "0"]
