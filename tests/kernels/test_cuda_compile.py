"""The output of NVRTC for all supported chips: registers, spills, wide memory accesses, seconds."""

import hashlib
import time
from collections import Counter
from functools import partial

import pytest
import torch

from fast_video_vae.kernels.cuda_ops import binaries
from fast_video_vae.kernels.cuda_ops.compiler import CompileError
from fast_video_vae.tests.kernels import nvrtc

# Three blocks of 256 threads in the 65536 registers of a multiprocessor.
REGISTERS = 80

# Two packs of 16 bytes as 8 numbers in float32, for each of 256 threads.
SHARED_BYTES = 16 << 10

# Seconds for all binaries of a first decode.
FIRST_DECODE_S = 5.0

# Kernels whose results are a few numbers per frame.
FEW = {"sum_chunks", "combine_chunks"}


@pytest.fixture(autouse=True)
def library():
    if nvrtc.compiler() is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed")


def known(chip):
    if chip not in nvrtc.compiler().chips():
        pytest.skip(f"{nvrtc.compiler().version} does not know sm_{chip}")


def is_default(chip, constants):
    return chip in (75, 90) and constants["DTYPE"] == "bfloat16" and constants["PACK"] > 1


@pytest.mark.parametrize("chip", nvrtc.CHIPS)
@pytest.mark.parametrize(
    "default", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["typical", "all"]
)
def test_all_kernels_compile_for_every_chip_without_spills(chip, default):
    known(chip)
    chosen = [case for case in nvrtc.variants() if not default or is_default(chip, case[1])]
    for source, constants in chosen:
        found = nvrtc.resources(source, constants, chip)
        # The names are not mangled, so the driver finds them.
        assert sorted(found) == sorted(binaries.kernels(source))
        for name, used in found.items():
            case = name, constants, used
            assert used["stack"] == used["spilled"] == 0, case
            assert 0 < used["registers"] <= REGISTERS, case
            assert used["shared"] <= SHARED_BYTES, case


@pytest.mark.parametrize(
    "chip", [90, *(pytest.param(chip, marks=pytest.mark.slow) for chip in (75, 89))]
)
def test_packs_are_read_and_written_in_16_bytes(chip):
    """16-bit kernels access eight numbers at a time where memory is aligned.

    Eight codes are 8 bytes.
    """
    pytest.importorskip("triton", reason="the disassembler is part of triton")
    known(chip)
    for source, constants in nvrtc.variants():
        if not is_default(90, constants):
            continue
        for name, lines in nvrtc.instructions(source, constants, chip).items():
            kinds = Counter(line for line in lines if line.startswith(("LDG", "STG", "LDL", "STL")))
            local = [kind for kind in kinds if kind[2] == "L"]
            stores = [kind for kind in kinds if kind.startswith("STG")]
            assert not local, (name, kinds)
            if name == "combine_chunks":
                continue
            assert any(kind.startswith("LDG") and ".128" in kind for kind in kinds), (name, kinds)
            if name not in FEW:
                coded = "CODES" in constants and name in ("norm_pixels", "write_pixels")
                size = ".64" if coded else ".128"
                assert stores, name
                assert all(size in kind for kind in stores), (name, kinds)


def test_a_mistake_is_reported_by_its_line(monkeypatch, tmp_path):
    (tmp_path / "wrong.cu").write_text("// one\n__device__ int two = three;\n")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    with pytest.raises(CompileError, match=r'^wrong\.cu\(2\): error: .*"three"'):
        nvrtc.compiled("wrong", {}, 90)
    with pytest.raises(CompileError, match="gpu-architecture"):
        nvrtc.compiled("wrong", {}, 12345)


def test_the_binaries_of_a_first_decode_take_seconds_once(monkeypatch, tmp_path):
    """The second start reads them."""
    pytest.importorskip("triton", reason="the launches of a decode need triton")
    monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(tmp_path))
    cases, option = nvrtc.first_decode(), "--gpu-architecture=sm_89"
    assert len(cases) > 5
    known(89)

    def all_of(compiler):
        started = time.process_time()
        made = [binaries.binary(compiler, *case, option) for case in cases]
        return time.process_time() - started, [hashlib.sha256(each).digest() for each in made]

    compiler = nvrtc.compiler()
    first_s, first = all_of(compiler)
    assert first_s <= FIRST_DECODE_S
    monkeypatch.setattr(compiler, "compile", partial(pytest.fail, "it compiles again"))
    second_s, second = all_of(compiler)
    assert second == first
    assert second_s <= 0.1 * first_s


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_compiler_of_pytorch_is_found_and_knows_the_device():
    from fast_video_vae.kernels.cuda_ops import compiler

    found = compiler.compiler()
    assert compiler.architecture(found, torch.device("cuda", 0)).startswith(
        "--gpu-architecture=sm_"
    )
