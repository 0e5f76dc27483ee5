"""The emulator that runs the CUDA kernels on the CPU: it is there, and it detects mistakes."""

import shutil
import subprocess
import sys

import pytest
import torch

from fast_video_vae.tests.kernels.cases import missing
from fast_video_vae.tests.kernels.emulator.library import FOLDER, compiler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its threads need Linux")


def test_the_emulator_runs_where_there_is_a_compiler():
    """Otherwise the tests of the ops would skip it silently."""
    if shutil.which(compiler()[0]) and not torch.cuda.is_available():
        assert missing("cuda") is None


def test_the_emulator_detects_wrong_barriers_and_shuffles(tmp_path):
    command, program = compiler(), tmp_path / "mistakes"
    if shutil.which(command[0]) is None:
        pytest.skip(f"the C++ compiler {command[0]} is not installed")
    command += ["-std=c++17", str(FOLDER / "mistakes.cpp"), "-o", str(program)]
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
