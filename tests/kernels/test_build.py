"""The library is built once, found ever after, and missed in one line.

What is in a process stays there, so every outcome has a process of its own, or at least one in
which nothing was ever loaded.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fast_video_vae.kernels import build
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.native_ops.library import CPU

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

posix = pytest.mark.skipif(sys.platform == "win32", reason="there is no build for Windows")

# Makes the checkout's name, and `call`: what the op says, its log lines, and whether it is right.
PRELUDE = f"""
import json, logging, os, runpy, sys
runpy.run_path({str(CONFTEST)!r})
import torch
from fast_video_vae import kernels
from fast_video_vae.kernels import build, errors
from fast_video_vae.kernels.native_ops.library import CPU

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

CALL_AND_TELL = """
told = call()
told["extension"] = "torch.utils.cpp_extension" in sys.modules
print(json.dumps(told))
"""

# Several misfortunes in one process, because torch takes long to import.
CALL_IN_EACH = """
results = {}
for name, settings in json.loads(sys.argv[1]).items():
    before = dict(os.environ)
    os.environ.update(settings)
    if name == "no ninja":
        build._path = lambda: os.environ["PATH"]
    CPU._outcome = None
    errors._logged.clear()
    lines.clear()
    call()
    results[name] = call()
    os.environ.clear()
    os.environ.update(before)
print(json.dumps(results))
"""

NAMES = (
    "switched off",
    "no compiler",
    "nothing on PATH",
    "no ninja",
    "broken",
    "unfit",
    "no folder",
)


def start(code, *arguments, **settings):
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, *arguments],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err == "", "nothing but the log is said"
    return json.loads(out)


def libraries(cache):
    return sorted((cache / "native").glob("*/*.so"))


@pytest.fixture(scope="module")
def library():
    """The library of this machine."""
    try:
        CPU.load()
    except Refusal as refusal:
        pytest.skip(str(refusal))
    (path,) = CPU.folder().glob("*.so")
    return path


@pytest.fixture(scope="module")
def misfortunes(tmp_path_factory):
    """What is said where there is no compiler, no ninja, or no place."""
    folder = tmp_path_factory.mktemp("misfortunes")
    fails = "echo 'main.cpp:1: error: no space left' >&2; exit 1"
    scripts = {
        "broken": fails,
        "unfit": f'case "$*" in *-dump*) echo 12.2.0;; *" -c "*) {fails};; *) echo gcc;; esac',
    }
    tools = folder / "tools"
    tools.mkdir()
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    a_file = folder / "file"
    a_file.touch()
    cache = {"FAST_VIDEO_VAE_CACHE": str(folder / "cache")}
    settings = {
        "switched off": {"FAST_VIDEO_VAE_NATIVE": "0"} | cache,
        "no compiler": {"CXX": "no-such-compiler -v"} | cache,
        "nothing on PATH": {"PATH": "", "CXX": ""} | cache,
        "broken": {"CXX": str(tools / "broken")} | cache,
        "unfit": {"CXX": str(tools / "unfit")} | cache,
        "no folder": {"FAST_VIDEO_VAE_CACHE": str(a_file)},
        "no ninja": {"PATH": str(tools), "CXX": "broken"} | cache,
    }
    assert set(settings) == set(NAMES)
    results = outcome(start(CALL_IN_EACH, json.dumps(settings)))
    return results | {"left over": [str(path) for path in (folder / "cache").rglob("*.*")]}


@posix
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_serves_where_nothing_can_be_built(misfortunes, name):
    told = misfortunes[name]
    assert told["right"]
    assert told["reason"].startswith("no backend takes this rms_norm_silu (native: ")


@posix
@pytest.mark.parametrize(
    ("name", "reason", "advice"),
    [
        ("no compiler", "there is no C++ compiler (no-such-compiler)", "apt install g++"),
        ("nothing on PATH", "there is no C++ compiler (c++)", "apt install g++"),
        ("no ninja", "there is no ninja", "pip install ninja"),
        ("broken", "the C++ compiler failed (main.cpp:1: error: no space left)", "set CXX"),
        ("unfit", "the C++ compiler failed (main.cpp:1: error: no space left)", "set CXX"),
        ("no folder", "native cannot be written (Not a directory)", "set FAST_VIDEO_VAE_CACHE"),
    ],
)
def test_what_is_missing_is_told_once_with_the_way_to_have_it(misfortunes, name, reason, advice):
    told = misfortunes[name]
    (warning,) = (line for level, line in told["lines"] if level != "INFO")
    assert reason in warning
    assert advice in warning
    assert "\n" not in warning
    assert reason in told["reason"]


@posix
def test_what_was_switched_off_is_no_warning(misfortunes):
    told = misfortunes["switched off"]
    reason = "FAST_VIDEO_VAE_NATIVE=0 switches the native kernels off"
    assert told["lines"] == [["INFO", f"Fast Video VAE: {reason}"]]
    assert reason in told["reason"]


@posix
def test_a_failed_build_leaves_nothing_behind(misfortunes):
    assert misfortunes["left over"] == []


def test_a_finished_library_is_found_without_the_tools_that_build(library):
    told = outcome(start(CALL_AND_TELL, CXX="no-such-compiler"))
    assert told == {"reason": None, "lines": [], "right": True, "extension": False}


@pytest.mark.parametrize("change", ["torch", "flags", "sources"])
def test_what_is_made_from_something_else_has_another_key(change, monkeypatch, tmp_path):
    before = CPU.key()
    assert before == CPU.key()
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif change == "flags":
        monkeypatch.setattr(CPU, "compiler", ("-O0",))
    else:
        for path in CPU.sources.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        monkeypatch.setattr(CPU, "sources", tmp_path)
        assert CPU.key() == before, "the place of the sources is no matter"
        (tmp_path / "ops.h").write_bytes(b"")
    assert CPU.key() != before


def test_a_library_that_was_cut_short_is_not_loaded(library, tmp_path):
    whole = library.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1] + b"\0\0"):
        (tmp_path / library.name).write_bytes(content)
        assert not build._loads(tmp_path)


def test_folders_of_killed_builds_are_cleared_after_a_while(tmp_path):
    old, fresh, finished = (tmp_path / name for name in ("building-a", "building-b", "c"))
    for folder in (old, fresh, finished):
        folder.mkdir()
        (folder / "lock").touch()
    for folder in (old, finished):
        os.utime(folder, (0, 0))
    build._clear_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == [fresh, finished]


@pytest.mark.slow
def test_a_broken_library_is_replaced(library, tmp_path):
    broken = tmp_path / "native" / library.parent.name / library.name
    broken.parent.mkdir(parents=True)
    broken.write_bytes(library.read_bytes()[:5000])
    told = outcome(start(CALL_AND_TELL, FAST_VIDEO_VAE_CACHE=str(tmp_path)))
    assert (told["reason"], told["right"]) == (None, True)
    ((level, line),) = told["lines"]
    assert level == "INFO"
    assert line.startswith("Fast Video VAE: building the CPU kernels, once")
    again = outcome(start(CALL_AND_TELL, FAST_VIDEO_VAE_CACHE=str(tmp_path)))
    assert again == {"reason": None, "lines": [], "right": True, "extension": False}


@pytest.mark.slow
def test_two_processes_build_at_once(library, tmp_path):
    both = [start(CALL_AND_TELL, FAST_VIDEO_VAE_CACHE=str(tmp_path)) for _ in range(2)]
    for told in map(outcome, both):
        assert (told["reason"], told["right"]) == (None, True)
    assert len(libraries(tmp_path)) == 1
    assert [path.name for path in (tmp_path / "native").iterdir()] == [library.parent.name]


@pytest.mark.slow
def test_a_killed_build_blocks_nobody(library, tmp_path):
    first = start(CALL_AND_TELL, FAST_VIDEO_VAE_CACHE=str(tmp_path))
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("native/building-*/build.ninja")):
        assert time.monotonic() < deadline, "the build never began"
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert libraries(tmp_path) == []
    told = outcome(start(CALL_AND_TELL, FAST_VIDEO_VAE_CACHE=str(tmp_path)))
    assert (told["reason"], told["right"]) == (None, True)
    assert len(libraries(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_set_of_instructions_passes_the_tests_of_the_ops(library, isa):
    """What those tests say of the fastest set, they say of each, in a process of its own."""
    environment = {**os.environ, "FAST_VIDEO_VAE_ISA": isa}
    code = f"{PRELUDE}\nCPU.load()\nprint(torch.ops.fast_video_vae.isa())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    if done.stdout.strip() != isa:
        pytest.skip(f"this processor has no {isa}")
    files = [Path(__file__).parent / f"test_{name}.py" for name in ("ops", "ops_layout")]
    command = [sys.executable, "-m", "pytest", "-q", "-k", "native", *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
