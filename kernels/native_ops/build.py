"""Build the C++ sources of `csrc/cpu` on the user's machine, once, and load them.

The library is cached under a hash of its inputs: sources, flags and the version of torch, so a
stale one is never loaded. A failure is logged once and remembered, and another backend runs. The
kernels use vector extensions that GCC and Clang have and Microsoft's compiler lacks. So Clang
compiles them on Windows, with the headers and libraries of Visual Studio, as PyTorch's own are.

Environment:
    FAST_VIDEO_VAE_NATIVE: 0 disables the CPU kernels.
    CXX: The compiler; default c++. Not read on Windows, where it often names Microsoft's.
"""

import logging
import os
import platform
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

from .. import cache
from ..backends import forced
from ..errors import Refusal, first_error, first_line, log_once
from ..ready import background
from ..warmup_log import preparing

_logger = logging.getLogger(__name__)

# Contraction to fused multiply-adds is allowed: ops that must be bit-identical to the reference
# have no sum after a product. The kernels need neither errno nor floating-point traps.
_FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")

# Longest wait for a compiler without a look at the end of the process.
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

# One build at a time, and two threads never load the same library.
_lock = threading.RLock()


class Failure(Exception):  # noqa: N818, a reason
    """The reason why there is no library, and `advice`, or "" if the user knows."""

    def __init__(self, reason: str, advice: str | None = None) -> None:
        super().__init__(reason)
        self.advice = _ADVICE.get(sys.platform, _ADVICE["linux"]) if advice is None else advice


class Library:
    """The library of PyTorch ops that is built from `sources`."""

    namespace = "fast_video_vae"
    sources = Path(__file__).parents[1] / "csrc" / "cpu"

    def __init__(self) -> None:
        self._outcome: str | None = None  # "": loaded; otherwise the reason why not
        self._job: background.Job | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether its ops can be called."""
        return self._outcome == ""

    def require(self) -> None:
        """Refuse a call while the library is not loaded; a build begins in the background."""
        # A caller that has selected this backend waits for the build.
        if self._outcome is None and forced() == "native":
            self.load()
        elif self._outcome is None and not self.prepare().is_done:
            raise Refusal("its library is being built")
        if not self.is_loaded:
            raise Refusal(self._outcome or "its build failed")

    def prepare(self) -> background.Job:
        """Load the library if it is built, otherwise let the background thread build it."""
        with _lock:
            if self._job is None:
                known = self._settle(build=False)
                build = ("the build of the CPU kernels", self._settle)
                self._job = background.DONE if known else background.submit(*build)
        return self._job

    def load(self) -> None:
        """Load the library, or build it first and wait for that; refuse always with one reason."""
        self._settle()
        if self._outcome:
            raise Refusal(self._outcome)

    def folder(self) -> Path:
        """Return the cache folder of this library, named by all that it is built from."""
        abi = str(torch.compiled_with_cxx11_abi())
        texts = torch.__version__, abi, *flags(), sys.platform, platform.machine()
        return cache.folder("native") / cache.key_of(texts, sorted(self.sources.iterdir()))

    def _settle(self, *, build: bool = True) -> bool:
        """Load or build the library unless that was tried; return whether its state is known."""
        with _lock:
            if self._outcome is not None:
                return True
            try:
                if not self._finds():
                    if not build:
                        return False
                    with preparing("kernel build", "CPU kernels"):
                        self._build()
                self._outcome = ""
            except Failure as failure:
                self._outcome = str(failure)
                if not failure.advice:
                    _logger.info("Fast Video VAE: %s", failure)
                else:
                    log_once(
                        f"no native CPU kernels: {failure}. PyTorch runs these ops instead, more "
                        f"slowly. To build them: {failure.advice}."
                    )
        return True

    def _finds(self) -> bool:
        """Load the library if it is built, complete and for this machine."""
        if os.environ.get("FAST_VIDEO_VAE_NATIVE") == "0":
            raise Failure("FAST_VIDEO_VAE_NATIVE=0 disables the native kernels", "")
        ops = getattr(torch.ops, self.namespace)
        if hasattr(ops, "key"):
            # Another copy of this package in the process: an op cannot be registered twice.
            if ops.key() == self.folder().name:
                return True
            raise Failure(
                "another version of this package has loaded its library",
                "keep one version installed",
            )
        # Mapping a truncated file can kill the process.
        for path in cache.whole(self.folder(), "*.so"):
            with suppress(OSError):  # of another machine that shares the folder
                torch.ops.load_library(str(path))
                return True
        return False

    def _build(self) -> None:
        """Build the library, move it to its folder and load it."""
        compiler, place = command(), self.folder()
        try:
            with cache.building(place.parent) as work:
                _logger.info("Fast Video VAE: building the CPU kernels once, about half a minute")
                built = _compiled(compiler, sorted(self.sources.glob("*.cpp")), work, place.name)
                final = place / f"{cache.digest(built.read_bytes())}.so"
                place.mkdir(exist_ok=True)
                cache.move(built, final)
            torch.ops.load_library(str(final))
        except OSError as error:
            raise Failure(
                f"the build failed ({first_line(error)})",
                "set FAST_VIDEO_VAE_CACHE to another, writable folder, or CXX to another compiler",
            ) from error


CPU = Library()


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


def _compiled(compiler: Sequence[str], sources: Sequence[Path], folder: Path, key: str) -> Path:
    """Compile and link a library of PyTorch ops with the macro FVV_KEY, and return its path."""
    # It is named .so on every platform; none requires another name.
    package = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    macros = (f"-DFVV_KEY={key}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}")
    compiling = [*compiler, *macros, f"-I{package / 'include'}", "-c"]
    objects = {f"{path.stem}.o": str(path) for path in sources}
    linking = [*compiler, "-shared", *objects, f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu"]
    run_all([[*compiling, path, "-o", made] for made, path in objects.items()], folder)
    run_all([[*linking, "-o", "library.so"]], folder)
    return folder / "library.so"


def run_all(commands: Sequence[list[str]], folder: Path) -> None:
    """Run all commands at once in `folder`, and end them all if one fails or the process ends."""
    processes = list[subprocess.Popen[bytes]]()

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
