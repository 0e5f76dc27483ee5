"""What the compilers make for GPUs that this machine lacks: no spills, and memory that fits."""

import json
import os
import subprocess

import pytest

from fast_video_vae.kernels.cuda_ops import binaries
from fast_video_vae.kernels.cuda_ops.compiler import CompileError
from fast_video_vae.tests.builders import module_command
from fast_video_vae.tests.kernels import nvrtc

# Limit of the shared memory of a program, in KiB, by compute capability.
SHARED = {80: 163, 86: 99, 90: 227, 120: 99}

# Ops of all widths.
CASES = ("bf16,96", "bf16,384", "bf16,1024", "fp32,384")

# All tiles of the convolutions.
CONVOLUTIONS = (
    "conv-fp16,96,96", "conv-bf16,96,96", "conv-fp16,192,192", "conv-bf16,192,192",
    # Tiles of 128 and 160 channels spill after their loop on sm_90, and are the fastest ones.
    "int8-bf16,96,96", "int8-bf16,192,192", "int8-bf16,3,96", "int8-fp32,192,192",
)  # fmt: skip

# Three blocks of 256 threads in the 65536 registers of a multiprocessor.
REGISTERS = 80

# Two packs of 16 bytes as 8 numbers in float32, for each of 256 threads.
SHARED_BYTES = 16 << 10


@pytest.mark.parametrize(
    ("chip", "cases"),
    [
        pytest.param(90, (CASES[0], CONVOLUTIONS[3], CONVOLUTIONS[4]), marks=pytest.mark.slow),
        *(
            pytest.param(
                chip,
                (*CASES, *CONVOLUTIONS),
                marks=pytest.mark.nightly,
                id=f"{chip}-all",
            )
            for chip in SHARED
        ),
    ],
)
def test_triton_compiles_every_kernel_without_spills(chip, cases):
    pytest.importorskip("triton", reason="compiling needs triton")
    command = module_command("fast_video_vae.tests.kernels.cross_compile", str(chip), *cases)
    environment = {**os.environ, "TRITON_INTERPRET": "0"}  # in a process without the interpreter
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["case"] for line in lines} == set(cases)
    for line in lines:
        assert line["stack"] == 0, line
        assert line["shared"] <= SHARED[chip] << 10, line


@pytest.fixture
def library():
    if nvrtc.compiler() is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("chip", "pack"), [(90, 8), *(pytest.param(75, n, marks=pytest.mark.slow) for n in (8, 1))]
)
def test_nvrtc_compiles_every_kernel_without_spills(chip, pack):
    for source, constants in nvrtc.variants(pack):
        found = nvrtc.resources(source, constants, chip)
        # The names are not mangled, so the driver finds them.
        assert sorted(found) == sorted(binaries.kernels(source))
        for name, used in found.items():
            case = name, constants, used
            assert used["stack"] == used["spilled"] == 0, case
            assert 0 < used["registers"] <= REGISTERS, case
            assert used["shared"] <= SHARED_BYTES, case


@pytest.mark.usefixtures("library")
def test_a_mistake_is_reported_by_its_line(monkeypatch, tmp_path):
    (tmp_path / "wrong.cu").write_text("// one\n__device__ int two = three;\n")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    with pytest.raises(CompileError, match=r'^wrong\.cu\(2\): error: .*"three"'):
        nvrtc.compiled("wrong", {}, 90)
    with pytest.raises(CompileError, match="gpu-architecture"):
        nvrtc.compiled("wrong", {}, 12345)
