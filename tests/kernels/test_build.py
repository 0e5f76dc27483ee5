"""The native library is built once and then found; `test_native_platforms.py` has the failures.

A loaded library stays in its process, so these tests use subprocesses in which none was loaded.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from fast_video_vae.kernels import cache
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.native_ops import build, compiler
from fast_video_vae.kernels.native_ops.build import CPU

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

posix = pytest.mark.skipif(
    sys.platform == "win32", reason="the compilers of these tests are shell scripts"
)

# Import the checkout as a package and define `call`: refusal, log lines and correctness of an op.
PRELUDE = f"""
import json, logging, runpy, sys
runpy.run_path({str(CONFTEST)!r})
import torch
from fast_video_vae import kernels

class Lines(logging.Handler):
    def emit(self, record):
        lines.append([record.levelname, record.getMessage()])

lines = []
logging.basicConfig(level=logging.INFO, handlers=[Lines()])

def call():
    x = torch.randn(1, 2, 3, 5, 8).movedim(-1, 1)
    try:
        with kernels.use_backend("native"):
            kernels.rms_norm_silu(x, torch.ones(8))
        reason = None
    except kernels.BackendError as error:
        reason = str(error)
    y = kernels.rms_norm_silu(x, torch.ones(8), silu=False).double()
    norm = x.double().norm(dim=1, keepdim=True)
    right = torch.allclose(y, x.double() / norm * 8**0.5, atol=1e-5)
    return {{"reason": reason, "lines": list(lines), "right": right}}
"""

CALL_AND_PRINT = """
result = call()
result["extension"] = "torch.utils.cpp_extension" in sys.modules
print(json.dumps(result))
"""


def start(code, **settings):
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err == "", "stderr has more than the log"
    return json.loads(out)


def libraries(cache):
    return sorted((cache / "native").glob("*/*.so"))


@pytest.fixture(scope="module")
def library():
    """Return the path of the library that is built for this machine."""
    try:
        CPU.load()
    except Refusal as refusal:
        pytest.skip(str(refusal))
    path, *_ = CPU.folder().glob("*.so")  # processes that built at once leave one each
    return path


def test_a_built_library_loads_without_build_tools(library):
    result = outcome(start(CALL_AND_PRINT, CXX="no-such-compiler"))
    assert result == {"reason": None, "lines": [], "right": True, "extension": False}


@pytest.mark.parametrize("change", ["torch", "flags", "sources"])
def test_other_torch_flags_or_sources_change_the_key(change, monkeypatch, tmp_path):
    before = CPU.key()
    assert before == CPU.key()
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif change == "flags":
        monkeypatch.setattr(compiler, "flags", lambda: ["-O0"])
    else:
        for path in CPU.sources.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        monkeypatch.setattr(CPU, "sources", tmp_path)
        assert CPU.key() == before, "the folder of the sources changes the key"
        (tmp_path / "ops.h").write_bytes(b"")
    assert CPU.key() != before


def test_a_truncated_library_is_not_loaded(library, tmp_path):
    whole = library.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1] + b"\0\0"):
        (tmp_path / library.name).write_bytes(content)
        assert not build._loads(tmp_path)


def test_old_folders_of_killed_builds_are_deleted(tmp_path):
    old, fresh, finished = (tmp_path / name for name in ("building-a", "building-b", "c"))
    for folder in (old, fresh, finished):
        folder.mkdir()
        (folder / "lock").touch()
    for folder in (old, finished):
        os.utime(folder, (0, 0))
    cache.clear_stale(tmp_path, "building-*")
    assert sorted(tmp_path.iterdir()) == [fresh, finished]


@pytest.mark.slow
def test_two_processes_build_at_once_in_place_of_a_broken_library(library, tmp_path):
    """And after a build that was killed."""
    first = start(CALL_AND_PRINT, FAST_VIDEO_VAE_CACHE=str(tmp_path))
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("native/building-*")):
        assert time.monotonic() < deadline, "the build did not start"
        time.sleep(0.05)
    process = psutil.Process(first.pid)
    for each in (process, *process.children(recursive=True)):  # compilers would write on
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    first.communicate()
    assert libraries(tmp_path) == []
    for path in tmp_path.glob("native/building-*"):
        os.utime(path, (0, 0))
    broken = tmp_path / "native" / library.parent.name / library.name
    broken.parent.mkdir(parents=True, exist_ok=True)
    broken.write_bytes(library.read_bytes()[:5000])
    both = [start(CALL_AND_PRINT, FAST_VIDEO_VAE_CACHE=str(tmp_path)) for _ in range(2)]
    for result in map(outcome, both):
        assert (result["reason"], result["right"]) == (None, True)
        ((level, line),) = result["lines"]
        assert level == "INFO"
        assert line.startswith("Fast Video VAE: building the CPU kernels once")
    assert len(libraries(tmp_path)) == 1
    assert [path.name for path in (tmp_path / "native").iterdir()] == [library.parent.name]
    again = outcome(start(CALL_AND_PRINT, FAST_VIDEO_VAE_CACHE=str(tmp_path)))
    assert again == {"reason": None, "lines": [], "right": True, "extension": False}


@posix
def test_an_interrupted_build_ends_its_compilers(tmp_path, monkeypatch):
    started = []

    class Compiler(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Compiler)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compiler._run([["sleep", "60"]], tmp_path)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert [process.poll() for process in started] == [-signal.SIGKILL]
