"""What the compilers make for GPUs that this machine lacks: no spills, and memory that fits."""

import functools
import json
import os
import re
import subprocess

import pytest

from fast_video_vae.kernels.cuda_ops.binaries import SOURCES, headers, kernels, options
from fast_video_vae.kernels.cuda_ops.compiler import CompileError, Compiler, opened
from fast_video_vae.kernels.cuda_ops.hopper_tile import MOST_SHARED, tile_of
from fast_video_vae.tests.builders import module_command

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
            pytest.param(chip, (*CASES, *CONVOLUTIONS), marks=pytest.mark.nightly)
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


# What the compiler prints of a kernel.
_USED = {
    "stack": r"(\d+) bytes stack frame",
    "spilled": r"(\d+) bytes spill stores",
    "registers": r"Used (\d+) registers",
    "shared": r"(\d+) bytes smem",
}


@functools.cache
def compiler():
    library = opened(["libnvrtc.so.13", "libnvrtc.so.12"])
    return library and Compiler(library)


def variants(pack):
    """Return the sources with constants of all kinds, in bfloat16 and packs of `pack` numbers."""
    moved = [{"RESULT": "bfloat16", "SAME": 1, "IMAGES": 0}]
    if pack == 1:  # as images have it
        moved += [{"RESULT": each, "SAME": 0, "IMAGES": 1} for each in ("float", "uint8", "uint16")]
    kinds = {"spread": moved} | {key: [{}, {"CODES": 1}] for key in ("rms_norm", "group_norm")}
    return [
        (path.stem, {"DTYPE": "bfloat16", "PACK": pack, **more})
        for path in sorted({*SOURCES.glob("*.cu")} - {SOURCES / "hopper_conv.cu"})
        for more in kinds.get(path.stem, [{}])
    ]


def compiled(source, constants, chip, *more):
    text = (SOURCES / f"{source}.cu").read_text(encoding="utf-8")
    given = [*options(constants, f"--gpu-architecture=sm_{chip}"), *more]
    return compiler().compile(text, headers(), given, f"{source}.cu")


def resources(source, constants, chip):
    """Return bytes of stack and spills, registers and shared memory of each kernel of a source."""
    log = compiled(source, constants, chip, "--ptxas-options=-v").log
    return {
        part.split("'")[1]: {
            key: int((re.search(pattern, part) or ["0", "0"])[1]) for key, pattern in _USED.items()
        }
        for part in log.split("Compiling entry function ")[1:]
    }


@pytest.fixture
def library():
    if compiler() is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("chip", "pack"), [(90, 8), *(pytest.param(75, n, marks=pytest.mark.slow) for n in (8, 1))]
)
def test_nvrtc_compiles_every_kernel_without_spills(chip, pack):
    for source, constants in variants(pack):
        found = resources(source, constants, chip)
        # The names are not mangled, so the driver finds them.
        assert sorted(found) == sorted(kernels(source))
        for name, used in found.items():
            case = name, constants, used
            assert used["stack"] == used["spilled"] == 0, case
            assert 0 < used["registers"] <= REGISTERS, case
            assert used["shared"] <= SHARED_BYTES, case


@pytest.mark.usefixtures("library")
def test_a_mistake_is_reported_by_its_line(monkeypatch, tmp_path):
    (tmp_path / "wrong.cu").write_text("// one\n__device__ int two = three;\n")
    monkeypatch.setitem(globals(), "SOURCES", tmp_path)
    with pytest.raises(CompileError, match=r'^wrong\.cu\(2\): error: .*"three"'):
        compiled("wrong", {}, 90)
    with pytest.raises(CompileError, match="gpu-architecture"):
        compiled("wrong", {}, 12345)


@pytest.mark.slow
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("copies", [True, False])
def test_the_convolution_for_hopper_has_no_spills(copies):
    tile = tile_of((3, 3, 3), 96, 96, copies=copies, norm=True)
    assert tile.constants["SHARED"] <= MOST_SHARED
    dtype, kind = (("bfloat16", "bf16"), ("half", "f16"))[copies]
    constants = {**tile.constants, "DTYPE": dtype, "VECTOR": dtype, "KIND": f'"{kind}"'}
    log = compiled("hopper_conv", constants, "90a", "--ptxas-options=-v").log
    assert re.search(r" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", log)
    assert "Used 168 registers" in log
    assert "Potential Performance Loss" not in log
