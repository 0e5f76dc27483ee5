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
from fast_video_vae.kernels.native_ops.library import CPU

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

DRIVER = Path(__file__).with_name("native_driver.cpp")


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


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\necho 'LINK : fatal error LNK1104: cannot open c10.lib'\nexit 1\n")
    path.chmod(0o755)


def call_and_log(caplog):
    """Call an op twice; return the warnings and whether the results are right."""
    x = torch.randn(3, 8)
    with caplog.at_level("WARNING"):
        assert CPU.prepare().wait(60)
        results = [kernels.silu_mul(x, x) for _ in range(2)]
    right = all(torch.allclose(y, torch.nn.functional.silu(x) * x) for y in results)
    return [record.getMessage() for record in caplog.records], right


def test_flags_fit_the_platform(target):
    flags = compiler.flags()
    assert "-O3" in flags
    assert not [flag for flag in flags if re.match(r"-m(arch|cpu|tune|avx)|/arch", flag)]
    assert ("-fopenmp" in flags) == ("linux" in target)
    windows = "windows" in target
    assert ("-fPIC" in flags) != windows
    assert (f"--target={target}" in flags) == ("-fms-runtime-lib=dll" in flags) == windows


def test_platforms_have_different_libraries(monkeypatch):
    keys = set()
    for system, machine, name, _ in PLATFORMS.values():
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", system)
            patch.setattr(platform, "machine", lambda machine=machine: machine)
            patch.setattr(sysconfig, "get_platform", lambda name=name: name)
            keys.add(CPU.key())
    assert len(keys) == len(PLATFORMS)


def test_a_missing_compiler_is_one_line_of_advice(target, fresh, caplog):
    (line,), right = call_and_log(caplog)
    assert right
    windows, name = "windows" in target, "clang-cl" if "windows" in target else "c++"
    assert f"no native CPU kernels: the C++ compiler {name} is not installed. PyTorch runs" in line
    advice = {"linux": "apt install g++", "apple": "xcode-select --install"}
    wanted = "Build Tools for Visual Studio" if windows else advice[target.split("-")[1]]
    assert wanted in line
    assert "\n" not in line


def test_a_failing_linker_is_one_line_with_its_error(target, fresh, caplog, tmp_path):
    for name in ("c++", "clang-cl"):
        program(tmp_path / name)
    (line,), right = call_and_log(caplog)
    assert right
    assert "the C++ compiler failed (LINK : fatal error LNK1104: cannot open c10.lib)" in line
    assert not list(tmp_path.glob("cache/native/building-*"))


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


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_the_kernels_compile_with_gcc_for_windows(isa, tmp_path):
    """No ABI of PyTorch's, but headers of Windows instead of POSIX."""
    found = shutil.which("x86_64-w64-mingw32-g++")
    if found is None:
        pytest.skip("needs x86_64-w64-mingw32-g++ (Debian: g++-mingw-w64-x86-64)")
    flags = ["-std=c++20", "-O1", "-Wno-psabi", "-fsyntax-only"]
    run(found, *flags, str(CPU.sources / f"{isa}.cpp"))


def test_the_generic_kernels_are_right_on_arm(tmp_path):
    """In an emulator."""
    found, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if found is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: qemu-user)")
    made = tmp_path / "driver"
    flags = [flag for flag in compiler.flags() if flag != "-fopenmp"]
    sources = [str(DRIVER), str(CPU.sources / "generic.cpp")]
    run(found, *flags, "-static", f"-I{CPU.sources}", *sources, "-o", str(made))
    run(emulator, str(made))


@pytest.mark.slow
def test_the_bindings_compile_for_arm(tmp_path):
    """With the headers of this machine's PyTorch, which are those of its Arm build, too."""
    found = shutil.which("aarch64-linux-gnu-g++")
    if found is None:
        pytest.skip("needs aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)")
    include = Path(torch.__file__).parent / "include"
    flags = [*compiler.flags(), "-DFVV_KEY=0", f"-I{include}", "-fsyntax-only"]
    run(found, *flags, str(CPU.sources / "bindings.cpp"))
