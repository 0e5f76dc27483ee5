"""Compile C++ sources to a library of PyTorch ops: the compiler and its flags on each platform.

The kernels use vector extensions that GCC and Clang have and Microsoft's compiler lacks. So Clang
compiles them on Windows, with the headers and libraries of Visual Studio, as PyTorch's own are.

Environment:
    CXX: The compiler; default c++. Not read on Windows, where it often names Microsoft's.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from ..ready import background

# Contraction to fused multiply-adds is allowed: ops that must be bit-identical to the reference
# have no sum after a product. The kernels need neither errno nor floating-point traps.
_FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")

# Longest wait for a compiler without a look at signals.
_TICK_S = 0.1

# Where Clang is on Windows if it is not on PATH.
_LLVM = ("LLVM/bin", "Microsoft Visual Studio/*/*/VC/Tools/Llvm/*/bin")


class Failure(Exception):  # noqa: N818, a reason
    """The reason why there is no library, and `advice` for the user; both without a full stop."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


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
    # A Mac without a compiler has a c++ that opens a window, at every start.
    if found is None or (sys.platform == "darwin" and found == "/usr/bin/c++" and not _has_tools()):
        raise Failure(f"the C++ compiler {chosen[0]} is not installed", _advice())
    return [found, *chosen[1:], *flags()]


def build(compiler: Sequence[str], sources: Sequence[Path], folder: Path, key: str) -> Path:
    """Compile and link a library of PyTorch ops with the macro FVV_KEY, and return its path."""
    # It is named .so on every platform; none requires another name.
    package = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    macros = (f"-DFVV_KEY={key}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}")
    compiling = [*compiler, *macros, f"-I{package / 'include'}", "-c"]
    objects = [f"{path.stem}.o" for path in sources]
    pairs = zip(sources, objects, strict=True)
    linking = [*compiler, "-shared", *objects, f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu"]
    try:
        _run([[*compiling, str(path), "-o", made] for path, made in pairs], folder)
        _run([[*linking, "-o", "library.so"]], folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Failure(f"the C++ compiler failed ({_first_error(error)})", _advice()) from error
    return folder / "library.so"


def _has_tools() -> bool:
    """Return whether Apple's command line tools are installed."""
    ask = ["/usr/bin/xcode-select", "--print-path"]
    try:
        return subprocess.run(ask, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _advice() -> str:
    if sys.platform == "win32":
        return (
            'install "Desktop development with C++" and "C++ Clang Compiler for Windows" of the '
            "Build Tools for Visual Studio"
        )
    if sys.platform == "darwin":
        return "xcode-select --install, or set CXX to a compiler"
    return "install g++ 10 or later (Debian, Ubuntu: apt install g++), or set CXX to a compiler"


def _run(commands: Sequence[list[str]], folder: Path) -> None:
    """Run all commands at once in `folder`, and end them all if one fails or at a signal."""
    processes: list[subprocess.Popen[bytes]] = []
    lock, over = threading.Lock(), False

    def start(command: list[str]) -> None:
        with lock:
            if over:
                return
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "LC_ALL": "C"},  # _first_error reads English
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            processes.append(process)

    try:
        # In a thread, because a signal raises in the main thread only: a process is always listed.
        with ThreadPoolExecutor(1) as thread:
            list(thread.map(start, commands))
        for process in processes:
            output = _output_of(process)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, output)
    finally:
        # A signal while the pool starts its thread leaves the pool without it, so that nothing
        # waits for the thread.
        with lock:
            over = True
        for process in processes:
            _end(process)


def _output_of(process: subprocess.Popen[bytes]) -> bytes:
    """Return the output of a compiler when it has ended."""
    # A signal that arrives just before a wait begins does not end it, so no wait is long.
    while True:
        background.check()
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_TICK_S)[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a compiler and the programs that it has started, which would run for seconds."""
    with process, suppress(OSError):  # it may end in between
        if process.poll() is None and sys.platform == "win32":
            process.kill()
        elif process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _first_error(error: Exception) -> str:
    """Return the line of a compiler's output that has the error."""
    output = str(error)
    if isinstance(error, subprocess.CalledProcessError) and error.output:
        output = error.output.decode(errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # Microsoft's linker: "LINK : fatal error LNK1104: ...".
    errors = [line for line in lines if re.search(r"\berror( \w+)?:", line, re.IGNORECASE)]
    line = (errors or lines or ["no message"])[0]
    return line if len(line) <= 200 else f"{line[:200]}..."
