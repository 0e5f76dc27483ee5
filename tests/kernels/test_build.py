"""The native library is built once and then found; `test_native_platforms.py` has the failures.

A loaded library stays in its process, so these tests use subprocesses in which none was loaded.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.native_ops import build
from fast_video_vae.kernels.native_ops.build import CPU
from fast_video_vae.kernels.ready import background

# Import the checkout as a package, call an op, and print what the user sees of the library.
CALL_AND_PRINT = f"""
import json, logging, runpy, sys
runpy.run_path({str(Path(__file__).resolve().parents[1] / "conftest.py")!r})
import torch
from fast_video_vae import kernels

class Lines(logging.Handler):
    def emit(self, record):
        lines.append([record.levelname, record.getMessage()])

lines = []
logging.basicConfig(level=logging.INFO, handlers=[Lines()])
x = torch.randn(1, 2, 3, 5, 8).movedim(-1, 1)
with kernels.use_backend("native"):
    y = kernels.rms_norm_silu(x, torch.ones(8), silu=False).double()
right = torch.allclose(y, x.double() / x.double().norm(dim=1, keepdim=True) * 8**0.5, atol=1e-5)
made = [[each.kind, each.label] for each in kernels.preparations()]
extension = "torch.utils.cpp_extension" in sys.modules
print(json.dumps({{"lines": lines, "right": right, "made": made, "extension": extension}}))
"""
AT_ONCE = {"lines": [], "right": True, "made": [], "extension": False}


def start(**settings):
    return subprocess.Popen(
        [sys.executable, "-c", CALL_AND_PRINT],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err == "", "stderr has more than the log"
    return json.loads(out)


@pytest.fixture(scope="module")
def library():
    """Return the path of the library that is built for this machine."""
    try:
        CPU.load()
    except Refusal as refusal:
        pytest.skip(str(refusal))
    return next(CPU.folder().glob("*.so"))


@pytest.mark.usefixtures("library")
def test_a_built_library_loads_without_build_tools():
    assert outcome(start(CXX="no-such-compiler")) == AT_ONCE


def test_other_torch_flags_or_sources_change_the_key(monkeypatch, tmp_path):
    keys = [CPU.folder()]
    for path in CPU.sources.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(CPU, "sources", tmp_path)
    assert CPU.folder() == keys[0], "the folder of the sources changes the key"
    (tmp_path / "ops.h").write_bytes(b"")
    keys.append(CPU.folder())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    keys.append(CPU.folder())
    monkeypatch.setattr(build, "flags", lambda: ["-O0"])
    assert len({*keys, CPU.folder()}) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("end", ["a signal", "the end of the process", "a failure"])
def test_an_interrupted_build_ends_its_compilers(end, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "alive")
    commands = [
        ["sh", "-c", "until [ -e failed ]; do sleep 0.01; done; false"],
        ["sh", "-c", "sleep 60 > alive; true"],  # a shell and its child, like c++ and cc1plus
    ]
    opened = []

    def interrupt():
        opened.append((tmp_path / "alive").open())  # waits for the child
        if end == "a signal":
            os.kill(os.getpid(), signal.SIGINT)
        elif end == "the end of the process":
            monkeypatch.setattr(background, "_ends", True)
        else:
            (tmp_path / "failed").touch()

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread, begun = threading.Thread(target=interrupt), time.monotonic()
    thread.start()
    try:
        with pytest.raises((KeyboardInterrupt, background.Ended, build.Failure)):
            build.run_all(commands, tmp_path)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, previous)
    with opened[0] as alive:
        assert alive.read() == ""  # at the end of the child
    assert time.monotonic() < begun + 30
