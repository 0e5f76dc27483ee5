"""Builds the C++ of `csrc/` on the machine that runs it, once, and finds it ever after.

The library lies in a cache folder of the user, under a key of everything that it is made from:
another torch, other sources or other flags have another key, so that nothing is ever stale. What
fails is told in one line and remembered; the reference serves instead.

Environment:
    FAST_VIDEO_VAE_NATIVE: 0 switches the native kernels off.
    FAST_VIDEO_VAE_CACHE: The cache folder, instead of the platform's.
    CXX: The compiler; c++ without.
"""

import hashlib
import importlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from .backend import Refusal, log_once

_logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc" / "cpu"
_NAME = "fast_video_vae_cpu"

# Contraction to fused multiply-adds is left on: what has to be bit-equal to the reference has no
# product that a sum follows. The kernels never ask for errno or floating-point traps.
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-g0")
# PyTorch's threads are OpenMP's, and its header splits the work in our code. Apple's compiler has
# none: bindings.cpp starts threads there.
_OPENMP = () if sys.platform == "darwin" else ("-fopenmp",)

# No build takes so long: a folder that is older was left by one that was killed.
_STALE_S = 3600

_lock = threading.Lock()
_outcome: str | None = None  # "" once the library is loaded, else why it is not


class _Failure(Exception):  # noqa: N818, a reason
    """Why there is no library, and what to do about it."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


def load() -> None:
    """Make `torch.ops.fast_video_vae` ready: find the library or build it, once per process.

    Raises:
        Refusal: There is none, with the same reason ever after.
    """
    if _outcome != "":
        _load()


def folder() -> Path:
    """Where the library of these sources and this torch lies, or would."""
    return _cache() / _key()


def _load() -> None:
    global _outcome
    with _lock:
        if _outcome is None:
            _outcome = _try()
    if _outcome:
        raise Refusal(_outcome)


def _try() -> str:
    if os.environ.get("FAST_VIDEO_VAE_NATIVE") == "0":
        reason = "FAST_VIDEO_VAE_NATIVE=0 switches the native kernels off"
        _logger.info("Fast Video VAE: %s", reason)
        return reason
    try:
        _find_or_build()
    except _Failure as failure:
        log_once(
            f"no native CPU kernels: {failure}. Plain PyTorch does the work, more slowly. "
            f"To have them: {failure.advice}."
        )
        return str(failure)
    return ""


def _find_or_build() -> None:
    if sys.platform == "win32":
        raise _Failure("the sources need GCC or Clang", "run it on Linux, WSL or macOS")
    key = _key()
    if hasattr(torch.ops.fast_video_vae, "key"):
        # A second copy of this package in the process; an op cannot be registered twice.
        if torch.ops.fast_video_vae.key() == key:
            return
        raise _Failure(
            "another version of this package has loaded its own", "keep one version installed"
        )
    if not _loads(folder()):
        _build(folder(), key)


def _key() -> str:
    """The digest of everything that the library is made from."""
    digest = hashlib.sha256()
    made_from = (
        torch.__version__,
        str(torch.compiled_with_cxx11_abi()),
        *_FLAGS,
        *_OPENMP,
        sys.platform,
        platform.machine(),
    )
    for text in made_from:
        digest.update(text.encode() + b"\0")
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _cache() -> Path:
    """The folder of all builds."""
    if chosen := os.environ.get("FAST_VIDEO_VAE_CACHE"):
        root = Path(chosen)
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches" / "fast-video-vae"
    else:
        user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = Path(user) / "fast-video-vae"
    return root.absolute() / "native"


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


def _build(place: Path, key: str) -> None:
    """Build the library, load it, and leave it in the folder.

    `torch.utils.cpp_extension.load` is the public way, and it loads what it has built, from where
    it has built it. So it builds in a fresh folder on the same disk, and the loaded file is then
    moved to its place, which no process that has it open minds: a killed build leaves nothing that
    looks finished, its lock blocks nobody, and of two processes the later replaces like by like.
    """
    _check_tools()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _clear_stale(place.parent)
        work = Path(tempfile.mkdtemp(prefix=f"building-{key}-", dir=place.parent))
    except OSError as error:
        raise _Failure(
            f"{place.parent} cannot be written ({error.strerror})",
            "set FAST_VIDEO_VAE_CACHE to a folder that may be written",
        ) from error
    try:
        _logger.info("Fast Video VAE: building the CPU kernels, once; about half a minute")
        _compile(work, key)
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


def _check_tools() -> None:
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    if shutil.which(compiler) is None:
        raise _Failure(
            f"there is no C++ compiler ({compiler})",
            "install g++ (Debian, Ubuntu: apt install g++), or set CXX to a compiler",
        )
    if shutil.which("ninja", path=_path()) is None:
        raise _Failure("there is no ninja", "pip install ninja")


def _path() -> str:
    """PATH, and the folder where pip puts ninja: an environment need not be activated."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))


def _clear_stale(folder: Path) -> None:
    for path in folder.glob("building-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def _compile(work: Path, key: str) -> None:
    """Build in the folder `work` and load."""
    try:
        with _quiet():
            cpp_extension = importlib.import_module("torch.utils.cpp_extension")
            cpp_extension.load(
                name=_NAME,
                sources=[str(path) for path in sorted(_SOURCES.glob("*.cpp"))],
                extra_cflags=[*_FLAGS, *_OPENMP, f"-DFVV_KEY={key}"],
                extra_ldflags=list(_OPENMP),
                build_directory=str(work),
                is_python_module=False,
                verbose=False,
            )
    except Exception as error:
        _logger.debug("the build failed", exc_info=True)
        raise _Failure(
            f"the C++ compiler failed ({_first_error(error)})",
            "update g++ (10 or later) or set CXX to another compiler",
        ) from error


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
    telling = [line for line in lines if "error:" in line.lower()]
    # ninja names the failed step and its command before the output.
    rest = [line for line in lines if not line.startswith(("Error building", "[", "FAILED"))]
    line = (telling or rest or lines or ["without a word"])[0]
    return line if len(line) <= 200 else f"{line[:200]}..."
