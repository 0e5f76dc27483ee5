"""The output of nvcc for all supported chips: registers, spills and wide memory accesses."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fast_video_vae.kernels.cuda_ops.library import CUDA
from fast_video_vae.tests.kernels.cases import DTYPES

CHIPS = (75, 80, 86, 89, 90, 100, 120)
SOURCES = sorted(CUDA.sources.glob("*.cu"))

# Flags that PyTorch's builder adds.
FLAGS = (
    "-std=c++17", "-O3", "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__",
)  # fmt: skip

# Three blocks of 256 threads in the 65536 registers of a multiprocessor.
REGISTERS = 80

# Two vectors of 16 bytes as 8 numbers in float32, for each of 256 threads.
SHARED_BYTES = 16 << 10


@pytest.fixture
def nvcc():
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    tool = shutil.which("nvcc", path=str(Path(home) / "bin") if home else None)
    return tool or pytest.skip("nvcc is neither on PATH nor in CUDA_HOME")


def compiled(nvcc, source, chip, folder):
    """Return stack, spills, registers and shared memory of every kernel of a file, from ptxas."""
    command = [
        nvcc, *FLAGS, f"-arch=sm_{chip}", "-Werror", "all-warnings", "-Xptxas", "-v,-warn-spills",
        "-cubin", "-o", str(folder / "kernels.cubin"), str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {}
    for part in done.stderr.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        found[name] = {
            key: int((re.search(pattern, part) or ["0", "0"])[1])
            for key, pattern in {
                "stack": r"(\d+) bytes stack frame",
                "spilled": r"(\d+) bytes spill stores",
                "registers": r"Used (\d+) registers",
                "shared": r"(\d+) bytes smem",
            }.items()
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_all_kernels_compile_for_every_chip_without_spills(nvcc, chip, tmp_path):
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    if f"sm_{chip}" not in known.stdout.split():
        pytest.skip(f"this nvcc does not know sm_{chip}")
    for source in SOURCES:
        found = compiled(nvcc, source, chip, tmp_path)
        assert found
        for name, used in found.items():
            assert used["stack"] == used["spilled"] == 0, (name, used)
            assert used["registers"] <= REGISTERS, (name, used)
            assert used["shared"] <= SHARED_BYTES, (name, used)


@pytest.mark.slow
def test_packs_are_read_and_written_in_16_bytes(nvcc, tmp_path):
    """16-bit kernels access eight numbers at a time, or one where memory is misaligned."""
    for source in SOURCES:
        path = tmp_path / "kernels.ptx"
        command = [nvcc, *FLAGS, "-arch=sm_90", "-ptx", "-o", str(path), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        bodies = path.read_text().split(".entry ")[1:]
        packs = [body for body in bodies if re.search(r"Pack\w*Li[48]E", body.split("(")[0])]
        assert len(packs) >= len(DTYPES), source.name
        for body in packs:
            name = body.split("(")[0]
            assert re.search(r"ld\.global\S*\.v4\.[bfu]32", body), name
            stores = re.findall(r"st\.(?:global|shared)\S+", body)
            wide = [store for store in stores if ".v4." in store]
            assert wide, name
            if "sum_chunks" not in name:  # its results are few
                assert wide == stores, name
