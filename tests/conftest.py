"""Bind this checkout to the name `fast_video_vae`, for any name of its folder.

It takes precedence over an installed copy, and includes the helpers, `fast_video_vae.tests`.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton
if "pytest" in sys.modules:  # and not a benchmark
    # The arguments of ops are checked within streams too; before the first import of `kernels`.
    os.environ.setdefault("FAST_VIDEO_VAE_CHECKS", "1")

_init = Path(__file__).resolve().parents[1] / "__init__.py"
_spec = importlib.util.spec_from_file_location("fast_video_vae", _init)
sys.modules["fast_video_vae"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["fast_video_vae"])


def pytest_configure():
    """The tensors of the tests are tiny: a second thread costs more than it does.

    The C++ kernels are built before the tests, which would otherwise run during their build.
    """
    torch.set_num_threads(1)
    importlib.import_module("fast_video_vae.kernels").native_library()


@pytest.fixture(autouse=True, scope="session")
def unchecked():
    """Check no device in the background, which takes seconds; tests of that ask for it."""
    prepared = importlib.import_module("fast_video_vae.vae.streaming.prepared.prepared_vae")
    done = importlib.import_module("fast_video_vae.kernels").DONE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "check_once", lambda *_: done)
        yield


def pytest_xdist_auto_num_workers(config):
    """Two processes, since each test uses one core; none where single files or tests are named."""
    return 0 if any(".py" in argument for argument in config.args) else min(2, os.cpu_count() or 1)
