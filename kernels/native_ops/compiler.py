"""Compile C++ sources to a library of PyTorch ops: the compiler and its flags on each platform.

The kernels use vector extensions that GCC and Clang have and Microsoft's compiler lacks. So Clang
compiles them on Windows, with the headers and libraries of Visual Studio, as PyTorch's own are.

Environment:
    CXX: The compiler; default c++. Not read on Windows, where it often names Microsoft's.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from ..errors import first_error
from ..ready import background

# Contraction to fused multiply-adds is allowed: ops that must be bit-identical to the reference
# have no sum after a product. The kernels need neither errno nor floating-point traps.
_FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")

# Longest wait for a compiler without a look at signals.
_TICK_S = 0.1

# Where Clang is on Windows if it is not on PATH.
_LLVM = ("LLVM/bin", "Microsoft Visual Studio/*/*/VC/Tools/Llvm/*/bin")

# What the user can do about a missing or failing compiler, by `sys.platform`.
_ADVICE = {
    "linux": "install g++ 10 or later (Debian, Ubuntu: apt install g++), or set CXX to a compiler",
    "darwin": "xcode-select --install, or set CXX to a compiler",
    "win32": 'install "Desktop development with C++" and "C++ Clang Compiler for Windows" of the '
    "Build Tools for Visual Studio",
}


class Failure(Exception):  # noqa: N818, a reason
    """The reason why there is no library, and `advice`, or "" if the user knows."""

    def __init__(self, reason: str, advice: str | None = None) -> None:
        super().__init__(reason)
        self.advice = _ADVICE.get(sys.platform, _ADVICE["linux"]) if advice is None else advice


def flags() -> list[str]:
    """Return the flags for compiling and linking on this platform."""
    if sys.platform == "win32":
        processor = "aarch64" if sysconfig.get_platform() == "win-arm64" else "x86_64"
        target = (f"--target={processor}-pc-windows-msvc", "--driver-mode=g++")
        # The C library in a DLL, as in PyTorch, because one DLL frees what another allocates.
        # Without -nostdlib, the linker adds the static one.
        return [*target, *_FLAGS, "-fms-runtime-lib=dll", "-nostdlib"]
    # PyTorch's threads on Linux. Apple's compiler has no OpenMP, and Clang on Windows has another
    # one than PyTorch; bindings.cpp starts threads there.
    return [*_FLAGS, "-fPIC", *(["-fopenmp"] if sys.platform == "linux" else [])]


def command() -> list[str]:
    """Return the path of the compiler, its arguments from CXX, and `flags()`."""
    folders, chosen = [os.environ.get("PATH", os.defpath)], ["clang-cl"]
    if sys.platform == "win32":
        for variable in ("ProgramFiles", "ProgramFiles(x86)"):
            if programs := os.environ.get(variable):
                folders += [str(path) for each in _LLVM for path in Path(programs).glob(each)]
    else:
        chosen = shlex.split(os.environ.get("CXX") or "c++")
    found = shutil.which(chosen[0], path=os.pathsep.join(folders))
    # A Mac without Apple's command line tools has a c++ that opens a window, at every start.
    if found == "/usr/bin/c++" and sys.platform == "darwin":
        asked = subprocess.run(["xcode-select", "--print-path"], capture_output=True, check=False)
        found = None if asked.returncode else found
    if found is None:
        raise Failure(f"the C++ compiler {chosen[0]} is not installed")
    return [found, *chosen[1:], *flags()]


def build(compiler: Sequence[str], sources: Sequence[Path], folder: Path, key: str) -> Path:
    """Compile and link a library of PyTorch ops with the macro FVV_KEY, and return its path."""
    # It is named .so on every platform; none requires another name.
    package = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    macros = (f"-DFVV_KEY={key}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}")
    compiling = [*compiler, *macros, f"-I{package / 'include'}", "-c"]
    objects = {f"{path.stem}.o": str(path) for path in sources}
    linking = [*compiler, "-shared", *objects, f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu"]
    _run([[*compiling, path, "-o", made] for made, path in objects.items()], folder)
    _run([[*linking, "-o", "library.so"]], folder)
    return folder / "library.so"


def _run(commands: Sequence[list[str]], folder: Path) -> None:
    """Run all commands at once in `folder`, and end them all if one fails or the process ends."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: list[str]) -> None:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},  # first_error reads English
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        processes.append(process)

    try:
        # In a thread, because a signal raises in the main thread only: each process is listed.
        with ThreadPoolExecutor(1) as thread:
            list(thread.map(start, commands))
        for process in processes:
            output = b""
            # A signal that arrives just before a wait begins does not end it: no wait is long.
            while process.returncode is None:
                background.check()
                with suppress(subprocess.TimeoutExpired):
                    output, _ = process.communicate(timeout=_TICK_S)
            if process.returncode:
                reason = first_error(output.decode(errors="replace")) or "no message"
                raise Failure(f"the C++ compiler failed ({reason})")
    finally:
        for process in processes:
            with process, suppress(OSError):  # it may end in between
                if process.poll() is None and sys.platform == "win32":
                    process.kill()
                elif process.poll() is None:  # with what it has started, which runs for seconds
                    os.killpg(process.pid, signal.SIGKILL)
