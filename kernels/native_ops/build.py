"""Build the C++ sources of `csrc/cpu` on the user's machine, once.

The library is cached in a folder of the user under a hash of its inputs: sources, flags and the
version of torch, so a stale library is never loaded. A failure is logged in one line and
remembered, and another backend runs instead. `native_ops/library.py` defines the library.

Environment:
    CXX: The compiler; default c++.
"""

import hashlib
import importlib
import io
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import torch

from .. import cache
from ..errors import Refusal, log_once
from ..warmup_log import preparing

_logger = logging.getLogger(__name__)

# Older build folders were left by a process that was killed; no build takes this long.
_STALE_S = 3600

# Seconds to wait for the compilers of an interrupted build to end.
_END_S = 2.0

# One lock for all libraries, because a build changes PATH.
_lock = threading.Lock()


class Failure(Exception):  # noqa: N818, a reason
    """The reason why there is no library, and `advice` for the user; both without a full stop."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


class Library:
    """A library of PyTorch ops that is built from sources; subclasses define its inputs.

    Attributes:
        name: Name of the extension while it is built.
        namespace: Its ops are `torch.ops.<namespace>`; the op `key` returns the hash of its inputs.
        title: Name in messages.
        minutes: Duration of the build in messages.
        sources: Folder of the sources.
    """

    name: str
    namespace: str
    title: str
    minutes: str
    sources: Path

    def __init__(self) -> None:
        self._outcome: str | None = None  # "": loaded; otherwise the reason why not

    def load(self) -> None:
        """Load the library, or build it first; once per process.

        Raises:
            Refusal: It cannot be loaded. Later calls raise the same reason.
        """
        if self._outcome is None:
            with _lock:
                if self._outcome is None:
                    self._outcome = self._try()
        if self._outcome:
            raise Refusal(self._outcome)

    def folder(self) -> Path:
        """Return the cache folder of this library."""
        return cache.folder("native") / self.key()

    def key(self) -> str:
        """Return the hash of everything that the library is built from."""
        digest = hashlib.sha256()
        texts = (
            torch.__version__,
            str(torch.compiled_with_cxx11_abi()),
            *self.made_from(),
            sys.platform,
            platform.machine(),
        )
        for text in texts:
            digest.update(text.encode() + b"\0")
        for path in self.files():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:32]

    def files(self) -> Sequence[Path]:
        """Return every source file of the library."""
        return sorted(self.sources.iterdir())

    def switched_off(self) -> str:
        """Return the reason why the user has disabled the library; "": it is enabled."""
        return ""

    def made_from(self) -> Sequence[str]:
        """Return the flags and versions that the library is built with.

        Returns:
            Texts that are part of the hash.

        Raises:
            Failure: The library cannot be built on this machine.
            NotImplementedError: In this base class.
        """
        raise NotImplementedError

    def check_tools(self) -> None:
        """Check that the compiler and ninja are installed.

        Raises:
            Failure: One of them is missing.
        """
        compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
        if shutil.which(compiler) is None:
            raise Failure(
                f"the C++ compiler {compiler} is not installed",
                "install g++ (Debian, Ubuntu: apt install g++), or set CXX to a compiler",
            )
        if shutil.which("ninja", path=_path()) is None:
            raise Failure("ninja is not installed", "pip install ninja")

    def options(self) -> dict[str, Any]:
        """Return the arguments for `torch.utils.cpp_extension.load`.

        Returns:
            Sources and flags by argument name.

        Raises:
            NotImplementedError: In this base class.
        """
        raise NotImplementedError

    def failed(self, error: str) -> Failure:
        """Return the failure for `error`, the compiler's message."""
        return Failure(
            f"the C++ compiler failed ({error})",
            "update g++ (10 or later) or set CXX to another compiler",
        )

    def _try(self) -> str:
        if reason := self.switched_off():
            _logger.info("Fast Video VAE: %s", reason)
            return reason
        try:
            self._find_or_build()
        except Failure as failure:
            log_once(
                f"no native {self.title}: {failure}. PyTorch runs these ops instead, more slowly. "
                f"To build them: {failure.advice}."
            )
            return str(failure)
        return ""

    def _find_or_build(self) -> None:
        if sys.platform == "win32":
            raise Failure("the sources need GCC or Clang", "use Linux, WSL or macOS")
        key = self.key()
        ops = getattr(torch.ops, self.namespace)
        if hasattr(ops, "key"):
            # Another copy of this package in the process: an op cannot be registered twice.
            if ops.key() == key:
                return
            raise Failure(
                "another version of this package has loaded its library",
                "keep one version installed",
            )
        if not _loads(self.folder()):
            with preparing("kernel build", self.title):
                self._build(self.folder(), key)

    def _build(self, place: Path, key: str) -> None:
        """Build the library, load it, and move it to its folder.

        `torch.utils.cpp_extension.load` loads the library from its build folder. The build runs in
        a new folder on the same disk, and the loaded file is then moved. So a killed build leaves
        no file that looks complete, its lock blocks no other process, and of two builds the later
        one replaces an equal file.
        """
        self.check_tools()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _clear_stale(place.parent)
            work = Path(tempfile.mkdtemp(prefix=f"building-{key}-", dir=place.parent))
        except OSError as error:
            raise Failure(
                f"{place.parent} is not writable ({error.strerror})",
                "set FAST_VIDEO_VAE_CACHE to a writable folder",
            ) from error
        try:
            _logger.info("Fast Video VAE: building the %s once, about %s", self.title, self.minutes)
            self._compile(work, key)
            (library,) = work.glob("*.so")
            place.mkdir(exist_ok=True)
            final = place / f"{_digest(library)}.so"
            library.replace(final)
            for other in place.glob("*.so"):
                if other != final:
                    other.unlink(missing_ok=True)
        except OSError as error:
            # The library is loaded in this process; the next process builds it again.
            _logger.debug("the kernels cannot be kept in %s: %s", place, error)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _compile(self, work: Path, key: str) -> None:
        """Build the library in the folder `work` and load it."""
        try:
            with _quiet():
                options = self.options()
                options["extra_cflags"] = [*options["extra_cflags"], f"-DFVV_KEY={key}"]
                extension().load(
                    name=self.name,
                    build_directory=str(work),
                    is_python_module=False,
                    verbose=False,
                    **options,
                )
        except Exception as error:
            _logger.debug("the build failed", exc_info=True)
            raise self.failed(_first_error(error)) from error
        except BaseException:
            # A signal: ninja is killed, but its compilers would run for another half a minute.
            _end_processes(work)
            raise


def extension() -> Any:  # noqa: ANN401, a module
    """Return the module `torch.utils.cpp_extension`, whose import takes a second.

    Before PyTorch 2.7 the import prints a warning where CUDA is installed but no GPU; it is hidden.

    Returns:
        The module.
    """
    with _quiet(), redirect_stderr(io.StringIO()):
        return importlib.import_module("torch.utils.cpp_extension")


def _loads(place: Path) -> bool:
    """Load the library in `place` if it is complete and for this machine.

    The file is named after its hash, because mapping a truncated file can kill the process.
    """
    for path in place.glob("*.so"):
        try:
            if path.stem == _digest(path):
                torch.ops.load_library(str(path))
                return True
        except OSError as error:  # of another machine that shares the folder
            _logger.debug("%s does not load: %s", path, error)
    return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _path() -> str:
    """Return PATH with the folder of pip's scripts, where ninja is; it may not be on PATH."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))


def _end_processes(folder: Path) -> None:
    """End the processes that run in `folder`, which belongs to this build; Linux only."""
    folder = folder.resolve()
    deadline = time.monotonic() + _END_S
    left = True
    # Repeat until there is none: a process that ends late may have started another.
    while left and time.monotonic() < deadline:
        left = False
        for place in Path("/proc").glob("[0-9]*/cwd"):
            # A process may end in between, or belong to another user.
            with suppress(OSError):
                if place.readlink() == folder:
                    left = True
                    os.kill(int(place.parent.name), signal.SIGTERM)


def _clear_stale(folder: Path) -> None:
    for path in folder.glob("building-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the build's output, and add the folder of ninja to PATH."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level, path = logger.level, os.environ.get("PATH")
    logger.setLevel(logging.CRITICAL)
    os.environ["PATH"] = _path()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if path is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = path


def _first_error(error: Exception) -> str:
    """Return the line of a compiler's output that has the error."""
    output = str(error)
    if isinstance(error, subprocess.CalledProcessError) and error.output:
        output = os.fsdecode(error.output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line.lower()]
    # ninja prints the failed step and its command before the output.
    rest = [line for line in lines if not line.startswith(("Error building", "[", "FAILED"))]
    line = (errors or rest or lines or ["no message"])[0]
    return line if len(line) <= 200 else f"{line[:200]}..."
