"""Builds C++ of `csrc/` on the machine that runs it, once, and finds it ever after.

A library lies in a cache folder of the user, under a key of everything that it is made from:
another torch, other sources or other flags have another key, so that nothing is ever stale. What
fails is told in one line and remembered; another backend serves instead. Which libraries there are,
and what they need, is in `native_ops/library.py` and `cuda_ops/library.py`.

Environment:
    FAST_VIDEO_VAE_CACHE: The cache folder, instead of the platform's.
    CXX: The compiler; c++ without.
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

from .errors import Refusal, log_once
from .warmup_log import preparing

_logger = logging.getLogger(__name__)

# No build takes so long: a folder that is older was left by one that was killed.
_STALE_S = 3600

# How long the processes of a build that was stopped are asked to end.
_END_S = 2.0

# One for all libraries: a build changes PATH for its time.
_lock = threading.Lock()


class Failure(Exception):  # noqa: N818, a reason
    """Why there is no library, and what to do about it (`advice`); both without a full stop."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


class Library:
    """A library of ops for PyTorch; its subclasses know what one is made from.

    Attributes:
        name: Of the file, while it is built.
        namespace: Its ops are `torch.ops.<namespace>`; one of them, `key`, tells its sources.
        title: What a message calls it.
        minutes: How long a message says that the build takes.
    """

    name: str
    namespace: str
    title: str
    minutes: str
    sources: Path

    def __init__(self) -> None:
        self._outcome: str | None = None  # "" once the library is loaded, else why it is not

    def load(self) -> None:
        """Make its ops ready: find the library or build it, once per process.

        Raises:
            Refusal: There is none, with the same reason ever after.
        """
        if self._outcome is None:
            with _lock:
                if self._outcome is None:
                    self._outcome = self._try()
        if self._outcome:
            raise Refusal(self._outcome)

    def folder(self) -> Path:
        """Where the library of these sources and this torch lies, or would."""
        return cache() / self.key()

    def key(self) -> str:
        """The digest of everything that the library is made from."""
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
        """Every file that the library is made from."""
        return sorted(self.sources.iterdir())

    def switched_off(self) -> str:
        """The reason why nobody wants it; "": it is wanted."""
        return ""

    def made_from(self) -> Sequence[str]:
        """What tells this library from another one of the same sources: flags, versions.

        Raises:
            Failure: This machine cannot have it.
        """
        raise NotImplementedError

    def check_tools(self) -> None:
        """Find what builds it.

        Raises:
            Failure: Something is missing.
        """
        compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
        if shutil.which(compiler) is None:
            raise Failure(
                f"there is no C++ compiler ({compiler})",
                "install g++ (Debian, Ubuntu: apt install g++), or set CXX to a compiler",
            )
        if shutil.which("ninja", path=_path()) is None:
            raise Failure("there is no ninja", "pip install ninja")

    def options(self) -> dict[str, Any]:
        """The sources and flags for `torch.utils.cpp_extension.load`."""
        raise NotImplementedError

    def failed(self, error: str) -> Failure:
        """What to say of a compiler's error."""
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
                f"no native {self.title}: {failure}. Plain PyTorch does the work, more slowly. "
                f"To have them: {failure.advice}."
            )
            return str(failure)
        return ""

    def _find_or_build(self) -> None:
        if sys.platform == "win32":
            raise Failure("the sources need GCC or Clang", "run it on Linux, WSL or macOS")
        key = self.key()
        ops = getattr(torch.ops, self.namespace)
        if hasattr(ops, "key"):
            # A second copy of this package in the process; an op cannot be registered twice.
            if ops.key() == key:
                return
            raise Failure(
                "another version of this package has loaded its own", "keep one version installed"
            )
        if not _loads(self.folder()):
            with preparing("kernel build", self.title):
                self._build(self.folder(), key)

    def _build(self, place: Path, key: str) -> None:
        """Build the library, load it, and leave it in the folder.

        `torch.utils.cpp_extension.load` is the public way, and it loads what it has built, from
        where it has built it. So it builds in a fresh folder on the same disk, and the loaded file
        is then moved to its place, which no process that has it open minds: a killed build leaves
        nothing that looks finished, its lock blocks nobody, and of two processes the later replaces
        like by like.
        """
        self.check_tools()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _clear_stale(place.parent)
            work = Path(tempfile.mkdtemp(prefix=f"building-{key}-", dir=place.parent))
        except OSError as error:
            raise Failure(
                f"{place.parent} cannot be written ({error.strerror})",
                "set FAST_VIDEO_VAE_CACHE to a folder that may be written",
            ) from error
        try:
            _logger.info(
                "Fast Video VAE: building the %s, once; about %s", self.title, self.minutes
            )
            self._compile(work, key)
            (library,) = work.glob("*.so")
            place.mkdir(exist_ok=True)
            final = place / f"{_digest(library)}.so"
            library.replace(final)
            for other in place.glob("*.so"):
                if other != final:
                    other.unlink(missing_ok=True)
        except OSError as error:
            # It is loaded: this process has it, and the next tries again.
            _logger.debug("the kernels cannot be kept in %s: %s", place, error)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _compile(self, work: Path, key: str) -> None:
        """Build in the folder `work` and load."""
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
            # A signal: ninja is killed, and its compilers would go on for half a minute.
            _end_processes(work)
            raise


def cache() -> Path:
    """The folder of all builds."""
    if chosen := os.environ.get("FAST_VIDEO_VAE_CACHE"):
        root = Path(chosen)
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches" / "fast-video-vae"
    else:
        user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = Path(user) / "fast-video-vae"
    return root.absolute() / "native"


def extension() -> Any:  # noqa: ANN401, a module
    """The module `torch.utils.cpp_extension`, which takes a second to import.

    Where there is nvcc and no GPU, it says so: PyTorch before 2.7 prints that.
    """
    with _quiet(), redirect_stderr(io.StringIO()):
        return importlib.import_module("torch.utils.cpp_extension")


def _loads(place: Path) -> bool:
    """Load the finished library of a folder, if there is a whole one for this machine.

    It is named after its own digest: to map a file that was cut short may kill the process.
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
    """PATH, and the folder where pip puts ninja: an environment need not be activated."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))


def _end_processes(folder: Path) -> None:
    """End what works in a folder that is this build's alone; only Linux tells where that is."""
    folder = folder.resolve()
    deadline = time.monotonic() + _END_S
    left = True
    # Again until there is none: one that is ended late may have started another.
    while left and time.monotonic() < deadline:
        left = False
        for place in Path("/proc").glob("[0-9]*/cwd"):
            # Others end at the same time, or belong to another user.
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
    """Keep what the build has to say to itself; for its time ninja is on PATH."""
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
    """The line of a compiler's output that says what is wrong."""
    output = str(error)
    if isinstance(error, subprocess.CalledProcessError) and error.output:
        output = os.fsdecode(error.output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line.lower() or line.startswith("nvcc fatal")]
    # ninja names the failed step and its command before the output.
    rest = [line for line in lines if not line.startswith(("Error building", "[", "FAILED"))]
    line = (telling or rest or lines or ["without a word"])[0]
    return line if len(line) <= 200 else f"{line[:200]}..."
