"""The native library on other platforms: its compiler, its flags, and that its sources compile.

The sources without PyTorch's headers need nothing of a platform but `malloc`, `free` and
`std::bad_alloc`, so Clang compiles them for systems whose headers are not installed.
"""

import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import errors
from fast_video_vae.kernels.native_ops import compiler
from fast_video_vae.kernels.native_ops.build import CPU

# sys.platform, platform.machine(), sysconfig.get_platform(), Clang's target.
PLATFORMS = {
    "linux x86": ("linux", "x86_64", "linux-x86_64", "x86_64-linux-gnu"),
    "linux arm": ("linux", "aarch64", "linux-aarch64", "aarch64-linux-gnu"),
    "mac x86": ("darwin", "x86_64", "macosx-11.0-x86_64", "x86_64-apple-macos11"),
    "mac arm": ("darwin", "arm64", "macosx-11.0-arm64", "arm64-apple-macos11"),
    "windows x86": ("win32", "AMD64", "win-amd64", "x86_64-pc-windows-msvc"),
    "windows arm": ("win32", "ARM64", "win-arm64", "aarch64-pc-windows-msvc"),
}

HEADERS = {
    "stdlib.h": "#include <stddef.h>\n"
    'extern "C" void* malloc(size_t);\nextern "C" void free(void*);\n',
    "new": "#pragma once\nnamespace std { struct bad_alloc {}; }\n",
}

# What the kernels call, on every system.
FUNCTIONS = {"free", "malloc", "memcpy", "memset"}


@pytest.fixture(params=PLATFORMS)
def target(request, monkeypatch):
    """Let this process seem to run on another platform, and return Clang's target for it."""
    system, machine, name, target = PLATFORMS[request.param]
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sysconfig, "get_platform", lambda: name)
    return target


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


def program(path, script="echo 'LINK : fatal error LNK1104: cannot open c10.lib'; exit 1"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def call_and_log(caplog):
    """Call an op twice; return the warnings and whether the results are right."""
    x = torch.randn(3, 8)
    with caplog.at_level("WARNING"):
        assert CPU.prepare().wait(60)
        results = [kernels.silu_mul(x, x) for _ in range(2)]
    right = all(torch.allclose(y, torch.nn.functional.silu(x) * x) for y in results)
    return [record.getMessage() for record in caplog.records], right


def test_flags_and_the_library_fit_the_platform(target, monkeypatch):
    flags, keys = compiler.flags(), {CPU.key()}
    assert "-O3" in flags
    assert not [flag for flag in flags if re.match(r"-m(arch|cpu|tune|avx)|/arch", flag)]
    assert ("-fopenmp" in flags) == ("linux" in target)
    windows = "windows" in target
    assert ("-fPIC" in flags) != windows
    assert (f"--target={target}" in flags) == ("-fms-runtime-lib=dll" in flags) == windows
    for system, machine, name, other in PLATFORMS.values():
        if other != target:
            monkeypatch.setattr(sys, "platform", system)
            monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
            monkeypatch.setattr(sysconfig, "get_platform", lambda name=name: name)
            keys.add(CPU.key())
    assert len(keys) == len(PLATFORMS)


@pytest.mark.parametrize("lacks", ["a compiler", "a linker"])
def test_a_failed_build_is_one_line_of_advice(target, lacks, fresh, caplog, tmp_path):
    windows, name = "windows" in target, "clang-cl" if "windows" in target else "c++"
    if lacks == "a linker":
        program(tmp_path / name)
    (line,), right = call_and_log(caplog)
    assert right
    assert "\n" not in line
    assert not list(tmp_path.glob("cache/native/building-*"))
    if lacks == "a linker":
        reason = "the C++ compiler failed (LINK : fatal error LNK1104: cannot open c10.lib)"
        assert reason in line
        return
    assert f"no native CPU kernels: the C++ compiler {name} is not installed. PyTorch runs" in line
    advice = {"linux": "apt install g++", "apple": "xcode-select --install"}
    wanted = "Build Tools for Visual Studio" if windows else advice[target.split("-")[1]]
    assert wanted in line


BROKEN = "echo 'main.cpp:1: error: no space left' >&2; exit 1"

# Script of the compiler, a setting, and the reason; the advice of the one warning.
FAILURES = {
    "disabled": ("", ("NATIVE", "0"), "FAST_VIDEO_VAE_NATIVE=0 disables the native kernels", None),
    "broken": (BROKEN, None, "compiler failed (main.cpp:1: error: no space left)", "set CXX"),
    "no linker": (
        f'case "$*" in *-shared*) {BROKEN};; esac', None,
        "the C++ compiler failed (main.cpp:1: error: no space left)", "set CXX",
    ),
    "no library": (
        "echo text > library.so", None, "the built library does not load (",
        "set FAST_VIDEO_VAE_CACHE",
    ),
    "no folder": (
        "", ("CACHE", __file__), "native is not writable (Not a directory)",
        "set FAST_VIDEO_VAE_CACHE",
    ),
}  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler is a shell script")
@pytest.mark.parametrize("name", FAILURES)
def test_the_reference_runs_after_a_failed_build_and_one_line(
    name, fresh, monkeypatch, caplog, tmp_path
):
    script, setting, reason, advice = FAILURES[name]
    program(tmp_path / "c++", script)
    if setting:
        monkeypatch.setenv(f"FAST_VIDEO_VAE_{setting[0]}", setting[1])
    lines, right = call_and_log(caplog)
    assert right
    with kernels.use_backend("native"), pytest.raises(kernels.BackendError) as caught:
        kernels.silu_mul(torch.ones(3, 8), torch.ones(3, 8))
    assert reason in caught.value.reasons["native"]
    assert len(lines) == (advice is not None)
    assert not advice or (reason in lines[0] and advice in lines[0] and "\n" not in lines[0])
    assert not list(tmp_path.rglob("building-*"))


@pytest.mark.parametrize(
    "place", ["LLVM/bin", "Microsoft Visual Studio/2022/BuildTools/VC/Tools/Llvm/x64/bin"]
)
def test_clang_is_found_where_windows_installs_it(place, fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("CXX", "cl")
    path = tmp_path / "ProgramFiles(x86)" / place / "clang-cl"
    program(path)
    assert compiler.command()[0] == str(path)


@pytest.mark.skipif(sys.platform == "darwin", reason="this Mac has the tools")
def test_a_mac_without_apples_tools_opens_no_window(fresh, monkeypatch, caplog):
    """Its c++ exists, and would ask in a window whether to install them."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(shutil, "which", lambda name, path: "/usr/bin/c++")
    (line,), right = call_and_log(caplog)
    assert right
    assert "the C++ compiler c++ is not installed" in line


@pytest.fixture(scope="module")
def clang():
    """Return a Clang that knows the flags of every platform."""
    for name in ("clang", *(f"clang-{version}" for version in range(30, 15, -1))):
        found = shutil.which(name)
        if found and int(re.search(r"version (\d+)", run(found, "--version"))[1]) >= 16:
            return found
    pytest.skip("needs Clang 16 or later")


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_the_kernels_compile_and_call_no_system(clang, target, isa, tmp_path):
    for name, text in HEADERS.items():
        (tmp_path / name).write_text(text)
    flags = [flag for flag in compiler.flags() if flag != "-fopenmp"]
    flags += ["-ffreestanding", "-nostdinc++", f"-I{tmp_path}", f"--target={target}"]
    # Clang's own checks of instructions, without its optimiser, which takes most of the time.
    flags += ["-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes", "-o", "-"]
    flags += ["-Werror", "-Wno-unused-command-line-argument"]
    made = run(clang, *flags, str(CPU.sources / f"{isa}.cpp"))
    called = set(re.findall(r"^declare .*@([a-z]\w*)\(", made, re.MULTILINE))
    assert called <= FUNCTIONS
    assert "__cpu_model" not in made  # needs a library that Windows lacks
