"""The CUDA C++ backend: memory, long rows, refusals and missing tools.

`test_ops.py` compares its results with the formulas, in the emulator of `emulator/` on machines
without a GPU. `test_cuda_compile.py` checks the output of nvcc.
"""

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, cuda_ops, errors, use_backend
from fast_video_vae.kernels.build import extension
from fast_video_vae.kernels.cuda_ops.library import CUDA
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.native_ops.library import CPU
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import (
    CUDA_OPS,
    DTYPES,
    inputs,
    missing,
    place,
    random,
    video,
)
from fast_video_vae.tests.kernels.emulator.library import EMULATED

GPU = torch.device("cuda", 0)


@pytest.fixture
def here():
    """Create tensors on a GPU, or on the CPU for the emulator."""
    reason = missing("cuda")
    if reason:
        pytest.skip(reason)
    with place("cuda"):
        yield


@pytest.fixture
def on_gpu(monkeypatch):
    """Let CPU tensors pass as tensors of a GPU on which the backend is enabled."""
    real = cuda_ops._refuse_device
    monkeypatch.setenv("FAST_VIDEO_VAE_CUDA", "1")
    monkeypatch.setattr(cuda_ops, "_refuse_device", lambda _, dtype: real(GPU, dtype))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Reset the state of a process: no library is built or loaded, and no warning is logged."""
    monkeypatch.setattr(CUDA, "_outcome", None)
    monkeypatch.setattr(
        CUDA, "namespace", "fast_video_vae_nowhere"
    )  # the emulator has registered the real one
    monkeypatch.setattr(errors, "_logged", set())
    monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="the emulator's threads need Linux")
def test_the_emulator_builds_where_the_cpu_kernels_do():
    """Otherwise the tests of the ops would skip it silently."""
    try:
        CPU.load()
    except Refusal as refusal:
        pytest.skip(str(refusal))
    if not torch.cuda.is_available():
        assert missing("cuda") is None


@pytest.mark.skipif(sys.platform != "linux", reason="the emulator's threads need Linux")
def test_the_emulator_detects_wrong_barriers_and_shuffles(tmp_path):
    command = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(command[0]) is None:
        pytest.skip(f"the C++ compiler {command[0]} is not installed")
    program, folder = tmp_path / "mistakes", EMULATED.sources
    command += ["-std=c++17", f"-I{folder}", str(folder / "mistakes.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    barrier = "a barrier that not all threads of the block reach"
    shuffle = "a shuffle that not all lanes of the warp take part in"
    assert done.stdout.splitlines() == [
        f"half a barrier: {barrier}, -1 -1",
        f"half a shuffle: {shuffle}, -1 -1",
        f"a short warp: {shuffle}, 1 -1",  # the complete warp before it finishes
        f"another distance: {shuffle}, -1 -1",
        "no barrier: fine, 0 2",  # one of the two thread orders gives a wrong result
        "too many threads: invalid configuration argument, -1 -1",
        "right: fine, 36 -1",
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", CUDA_OPS)
def test_calls_repeat_bit_for_bit_in_memory_of_nan(here, op, dtype):
    """Temporary memory of an op is filled with NaN too."""
    results = []
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        for _ in range(2):
            args, keywords = inputs(op, dtype)
            with use_backend("cuda"):
                results.append(getattr(kernels, op)(*args, **keywords))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not results[0].isnan().any()
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_memory_is_read_correctly(here, dtype):
    """Kernels read packs if all tensors are aligned, and single numbers otherwise."""
    rows = random(50, 96, dtype=dtype)
    misaligned = torch.zeros(rows.numel() + 1, dtype=dtype)[1:].view(rows.shape).copy_(rows)
    with use_backend("cuda"):
        for args in ((misaligned, rows), (rows, misaligned)):
            formulas.holds("silu_mul", *args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [520, 1025, 4096])
def test_rows_longer_than_a_warp_are_correct(here, dtype, channels):
    x, numbers = video(1, channels, 2, 2, 3, dtype=dtype), random(2, channels, seed=1)
    weight, bias = numbers
    rows = x.movedim(1, -1)
    tail = video(1, channels, 1, 2, 3, dtype=dtype, seed=2)
    with use_backend("cuda"):
        result = kernels.rms_norm_silu(x, weight, bias=bias, tail=tail)
        formulas.check(result[:, :, 1:], *formulas.rms_norm_silu(x, weight, bias=bias))
        assert torch.equal(tail, result[:, :, 2:])
        formulas.holds("silu_mul", rows, rows)
        formulas.holds("group_norm_silu", x, weight, bias, 5 if channels == 1025 else 8)


def test_the_backend_is_disabled_by_default(monkeypatch):
    monkeypatch.delenv("FAST_VIDEO_VAE_CUDA", raising=False)
    with pytest.raises(Refusal, match="FAST_VIDEO_VAE_CUDA=1 enables it"):
        cuda_ops._refuse_device(GPU, torch.float32)
    with use_backend("cuda"):
        cuda_ops._refuse_device(GPU, torch.float32)
    monkeypatch.setenv("FAST_VIDEO_VAE_CUDA", "1")
    cuda_ops._refuse_device(GPU, torch.float32)


def test_bfloat16_is_refused_on_gpus_without_it(monkeypatch, on_gpu):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    for dtype in (torch.float32, torch.float16):
        cuda_ops._refuse_device(GPU, dtype)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with (
        use_backend("cuda"),
        pytest.raises(BackendError, match=r"needs compute capability 8\.0; this GPU has 7\.5"),
    ):
        kernels.silu_mul(x, x)


def test_pytorch_for_amd_is_refused(monkeypatch, on_gpu):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(Refusal, match="AMD"):
        cuda_ops._refuse_device(GPU, torch.float32)


def test_kernels_run_on_the_device_of_the_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert isinstance(cuda_ops._entered(GPU), torch.cuda.device)
    assert isinstance(cuda_ops._entered(torch.device("cuda", 1)), nullcontext)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the emulator can fail on request")
def test_a_failed_launch_is_an_error(here, monkeypatch):
    rows = torch.ones(4, 16)
    monkeypatch.setenv("FVV_EMULATOR_FAILS", "no luck today")
    with use_backend("cuda"):
        with pytest.raises(RuntimeError, match="a kernel did not start: no luck today"):
            kernels.silu_mul(rows, rows)
        monkeypatch.delenv("FVV_EMULATOR_FAILS")
        formulas.holds("silu_mul", rows, rows)


def test_the_bindings_check_their_arguments(here):
    """Any code can call `torch.ops`."""
    ops, rows, ones = torch.ops.fast_video_vae_cuda, torch.ones(4, 16), torch.ones(16)
    x = video(1, 16, 2, 3, 4)
    for op, args, message in (
        (ops.silu_mul, (rows, rows, rows[1:]), "sizes do not fit"),
        (ops.silu_mul, (rows, rows.half(), rows), "dtypes or devices do not fit"),
        (ops.silu_mul, (rows.mT, rows.mT, rows.mT), "the last dimension is not dense"),
        (ops.rms_norm_silu, (x, ones[1:], True, None, None, x), "parameters do not fit"),
        (ops.rms_norm_silu, (x.flip(1).contiguous(), ones, True, None, None, x), "channels-last"),
        (ops.rms_norm_silu, (x, ones, True, None, x, x), "sizes do not fit"),
        (ops.group_norm_silu, (x, ones, ones, 3, 0.0, True, None, None, x), "groups do not fit"),
        (ops.group_norm_silu, (x, ones, ones, 4, 0.0, True, ones[:8], None, x), "statistics do"),
        (ops.group_norm_statistics, (x, 4, 0.0, ones[:8]), "statistics do not fit"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*args, 0)


def fails(**_):
    raise RuntimeError("Error building\nFAILED: a.o\nnvcc -c a.cu\nnvcc fatal   : no such chip")


@pytest.mark.parametrize(
    ("version", "home", "reason", "advice"),
    [
        (None, None, "this PyTorch is built without CUDA", "install a PyTorch for CUDA"),
        ("13.0", "empty", "nvcc is not installed ({})", "install the CUDA toolkit 13.0"),
        ("13.0", None, "nvcc is not installed (CUDA_HOME is not set)", "set CUDA_HOME"),
        (
            "13.0", "whole", "nvcc or the C++ compiler failed (nvcc fatal   : no such chip)",
            "a g++ that it supports",
        ),
    ],
)  # fmt: skip
def test_a_missing_tool_is_logged_once_and_another_backend_runs(
    version, home, reason, advice, monkeypatch, tmp_path, on_gpu, fresh, caplog
):
    folder = home and tmp_path / home
    if home == "whole":
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "nvcc").touch()
    reason = reason.format(folder)
    module = extension()
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(module, "CUDA_HOME", folder and str(folder))
    monkeypatch.setattr(module, "load", fails)
    x = random(3, 16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with use_backend("cuda"), pytest.raises(BackendError, match=re.escape(reason)):
                kernels.silu_mul(x, x)
            formulas.holds("silu_mul", x, x)
    (line,) = caplog.messages
    assert reason in line
    assert advice in line
    assert "\n" not in line


def test_chips_and_cuda_versions_change_the_key(monkeypatch):
    keys = []
    for version, chips in (
        ("12.8", [(9, 0)]),
        ("13.0", [(9, 0)]),
        ("13.0", [(12, 0)]),
        ("13.0", [(9, 0), (12, 0), (9, 0)]),
        ("13.0", [(12, 0), (9, 0)]),  # the same chips
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "device_count", partial(len, chips))
        monkeypatch.setattr(torch.cuda, "get_device_capability", chips.__getitem__)
        keys.append(CUDA.key())
    assert len(set(keys)) == 4
    assert keys[3] == keys[4]
    assert CUDA._architectures() == [
        "-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_120,code=sm_120",
    ]  # fmt: skip
