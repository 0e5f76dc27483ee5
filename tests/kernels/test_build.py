"""The native library: its key, its compilers, what a failure costs, and how it is found."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import errors
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.native_ops import build
from fast_video_vae.kernels.native_ops.build import CPU
from fast_video_vae.kernels.ready import background

# sys.platform, platform.machine(), sysconfig.get_platform(), and the target of the compiler.
PLATFORMS = {
    "linux x86": ("linux", "x86_64", "linux-x86_64", "x86_64-linux-gnu"),
    "linux arm": ("linux", "aarch64", "linux-aarch64", "aarch64-linux-gnu"),
    "mac arm": ("darwin", "arm64", "macosx-11.0-arm64", "arm64-apple-macos11"),
    "windows x86": ("win32", "AMD64", "win-amd64", "x86_64-pc-windows-msvc"),
    "windows arm": ("win32", "ARM64", "win-arm64", "aarch64-pc-windows-msvc"),
}

# Import the checkout as a package, call an op, and print what was prepared for it.
CALL = """
import runpy, sys; runpy.run_path(sys.argv[1]); import torch
from fast_video_vae import kernels
x = torch.ones(2, 8)
with kernels.use_backend("native"): y = kernels.silu_mul(x, x)
print(kernels.preparations(), "torch.utils.cpp_extension" in sys.modules, y[1, 7].item() > 0.7)
"""


def test_a_built_library_loads_without_build_tools():
    """In another process, because a loaded library stays in its own."""
    try:
        CPU.load()
    except Refusal as refusal:
        pytest.skip(str(refusal))
    done = subprocess.run(
        [sys.executable, "-c", CALL, Path(__file__).parents[1] / "conftest.py"],
        env={**os.environ, "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[] False True\n", "")


def play(monkeypatch, system, machine, name):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sysconfig, "get_platform", lambda: name)


def test_flags_and_the_key_fit_platform_torch_and_sources(monkeypatch, tmp_path):
    keys = [CPU.folder()]
    for path in CPU.sources.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(CPU, "sources", tmp_path)
    assert CPU.folder() == keys[0], "the folder of the sources changes the key"
    (tmp_path / "ops.h").write_bytes(b"")
    keys.append(CPU.folder())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    for system, machine, name, target in PLATFORMS.values():
        play(monkeypatch, system, machine, name)
        keys.append(CPU.folder())
        flags = build.flags()
        assert "-O3" in flags
        assert not [flag for flag in flags if flag.startswith(("-march", "-mcpu", "-mavx"))]
        assert ("-fopenmp" in flags) == ("linux" in target)
        windows = "windows" in target
        assert ("-fPIC" in flags) != windows
        assert (f"--target={target}" in flags) == ("-fms-runtime-lib=dll" in flags) == windows
    monkeypatch.setattr(build, "flags", lambda: ["-O0"])
    assert len({*keys, CPU.folder()}) == len(PLATFORMS) + 3


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Let the library be looked for again, in an empty cache and without a compiler on PATH."""
    monkeypatch.setattr(CPU, "_outcome", None)
    monkeypatch.setattr(CPU, "_job", None)
    monkeypatch.setattr(CPU, "namespace", "fast_video_vae_never_registered")
    monkeypatch.setattr(errors, "_logged", set())
    monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("ProgramFiles", "ProgramFiles(x86)"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("CXX", raising=False)
    # The original needs modules of Windows where this process seems to run there.
    monkeypatch.setattr(shutil, "which", lambda name, path: next(
        (str(found) for found in (Path(each) / name for each in path.split(":")) if found.exists()),
        None,
    ))  # fmt: skip


def program(path, script=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def refused(caplog):
    """Call an op twice; return why the library does not run it, and the warnings."""
    x = torch.randn(3, 8)
    with caplog.at_level("WARNING"):
        assert CPU.prepare().wait(60)
        for _ in range(2):
            expected = torch.nn.functional.silu(x) * x
            torch.testing.assert_close(kernels.silu_mul(x, x), expected)
            with kernels.use_backend("native"), pytest.raises(kernels.BackendError) as caught:
                kernels.silu_mul(x, x)
    return caught.value.reasons["native"], caplog.messages


@pytest.mark.parametrize(
    ("platform", "name", "advice"),
    [
        ("linux arm", "c++", "apt install g++"),
        ("mac arm", "c++", "xcode-select --install"),
        ("windows x86", "clang-cl", "Build Tools for Visual Studio"),
    ],
)
def test_a_missing_compiler_costs_one_line_of_advice(
    platform, name, advice, fresh, monkeypatch, caplog
):
    play(monkeypatch, *PLATFORMS[platform][:3])
    if platform == "mac arm":
        # Its c++ exists, and would ask in a window whether to install the tools.
        monkeypatch.setattr(shutil, "which", lambda *_, **__: "/usr/bin/c++")
        lacks = subprocess.CompletedProcess([], 2)
        monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: lacks)
    reason, (line,) = refused(caplog)
    assert reason == f"the C++ compiler {name} is not installed"
    assert f"no native CPU kernels: {reason}. PyTorch runs" in line
    assert advice in line
    assert "\n" not in line


# Script of the compiler, a setting, and the reason; the advice of the one warning.
FAILURES = {
    "disabled": ("", ("NATIVE", "0"), "FAST_VIDEO_VAE_NATIVE=0 disables the native kernels", None),
    "no linker": (
        "case $* in *-shared*) echo 'main.cpp:1: error: no space left' >&2; exit 1; esac", None,
        "the C++ compiler failed (main.cpp:1: error: no space left)", "set CXX",
    ),
    "no library": ("echo text > library.so", None, "the build failed (", "FAST_VIDEO_VAE_CACHE"),
    "no folder": ("", ("CACHE", __file__), "[Errno 20] Not a directory", "FAST_VIDEO_VAE_CACHE"),
}  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler is a shell script")
@pytest.mark.parametrize("name", FAILURES)
def test_the_reference_runs_after_a_failed_build_and_one_line(
    name, fresh, monkeypatch, caplog, tmp_path
):
    script, setting, expected, advice = FAILURES[name]
    path = program(tmp_path / "c++", script)
    if setting:
        monkeypatch.setenv(f"FAST_VIDEO_VAE_{setting[0]}", setting[1])
    before = len(kernels.preparations())
    reason, lines = refused(caplog)
    assert expected in reason
    assert len(kernels.preparations()) - before == (name != "disabled")
    assert len(lines) == (advice is not None)
    assert not advice or (reason in lines[0] and advice in lines[0] and "\n" not in lines[0])
    assert not list(path.parent.rglob("building-*"))


def test_clang_is_found_where_windows_installs_it(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("CXX", "cl")
    for place in ("Microsoft Visual Studio/2022/BuildTools/VC/Tools/Llvm/x64/bin", "LLVM/bin"):
        path = program(tmp_path / "ProgramFiles(x86)" / place / "clang-cl")
        assert build.command()[0] == str(path)


@pytest.mark.skipif(sys.platform == "win32", reason="the compilers are shell scripts")
@pytest.mark.parametrize("end", ["the process", "a failure"])
def test_the_end_of_a_build_ends_its_compilers(end, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "alive")
    commands = [
        ["sh", "-c", "until [ -e failed ]; do sleep 0.01; done; false"],
        ["sh", "-c", "sleep 60 > alive; true"],  # a shell and its child, like c++ and cc1plus
    ]
    opened = []

    def interrupt():
        opened.append((tmp_path / "alive").open())  # waits for the child
        if end == "the process":
            monkeypatch.setattr(background, "_ends", True)
        else:
            (tmp_path / "failed").touch()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(background.Ended if end == "the process" else build.Failure):
        build.run_all(commands, tmp_path)
    thread.join()
    with opened[0] as alive:
        assert alive.read() == ""  # at the end of the child


def test_no_call_waits_for_the_build(fresh, monkeypatch):
    monkeypatch.setattr(CPU, "_build", lambda: pytest.fail("in the thread of a call"))
    monkeypatch.setattr(build.background, "submit", build.background.Job)
    x = torch.randn(3, 8)
    torch.testing.assert_close(kernels.silu_mul(x, x), torch.nn.functional.silu(x) * x)
    assert not CPU.prepare().is_done
