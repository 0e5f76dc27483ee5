"""Build the C++ sources of `csrc/cpu` on the user's machine, once.

The library is cached under a hash of its inputs: sources, flags and the version of torch, so a
stale one is never loaded. A failure is logged once and remembered, and another backend runs.

Environment:
    FAST_VIDEO_VAE_NATIVE: 0 disables the CPU kernels.
"""

import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import torch

from .. import cache
from ..backends import forced
from ..errors import Refusal, first_line, log_once
from ..ready import background
from ..warmup_log import preparing
from . import compiler
from .compiler import Failure

_logger = logging.getLogger(__name__)

# One build at a time, and two threads never load the same library.
_lock = threading.Lock()


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
        if self._outcome:
            raise Refusal(self._outcome)

    def prepare(self) -> background.Job:
        """Load the library if it is built, otherwise let the background thread build it."""
        if self._job is None:
            with _lock:
                if self._job is None and self._is_built():
                    self._job = background.DONE
                elif self._job is None:
                    self._job = background.submit("the build of the CPU kernels", self._settle)
            if self._job is background.DONE:
                self._settle()
        return self._job

    def load(self) -> None:
        """Load the library, or build it first and wait for that; refuse always with one reason."""
        self._settle()
        if self._outcome:
            raise Refusal(self._outcome)

    def _settle(self) -> None:
        """Load or build the library unless that was tried before."""
        if self._outcome is None:
            with _lock:
                if self._outcome is None:
                    self._outcome = self._try()

    def _is_built(self) -> bool:
        """Return whether nothing is compiled to load the library, or to find that it cannot be."""
        return bool(_switched_off()) or any(self.folder().glob("*.so"))

    def folder(self) -> Path:
        """Return the cache folder of this library."""
        return cache.folder("native") / self.key()

    def key(self) -> str:
        """Return the hash of everything that the library is built from."""
        texts = (
            torch.__version__,
            str(torch.compiled_with_cxx11_abi()),
            *compiler.flags(),
            sys.platform,
            platform.machine(),
        )
        return cache.key_of(texts, sorted(self.sources.iterdir()))

    def _try(self) -> str:
        if reason := _switched_off():
            _logger.info("Fast Video VAE: %s", reason)
            return reason
        try:
            self._find_or_build()
        except Failure as failure:
            log_once(
                f"no native CPU kernels: {failure}. PyTorch runs these ops instead, more slowly. "
                f"To build them: {failure.advice}."
            )
            return str(failure)
        return ""

    def _find_or_build(self) -> None:
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
            with preparing("kernel build", "CPU kernels"):
                self._build(self.folder(), key)

    def _build(self, place: Path, key: str) -> None:
        """Build the library, move it to its folder and load it."""
        # The build runs in a new folder on the same disk. So a killed build leaves no file that
        # looks complete, and of two builds the later one replaces an equal file.
        command = compiler.command()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            cache.clear_stale(place.parent, "building-*")
            work = Path(tempfile.mkdtemp(prefix=f"building-{key}-", dir=place.parent))
        except OSError as error:
            raise Failure(
                f"{place.parent} is not writable ({error.strerror})",
                "set FAST_VIDEO_VAE_CACHE to a writable folder",
            ) from error
        try:
            _logger.info("Fast Video VAE: building the CPU kernels once, about half a minute")
            built = compiler.build(command, sorted(self.sources.glob("*.cpp")), work, key)
            final = place / f"{_digest(built)}.so"
            place.mkdir(exist_ok=True)
            with suppress(OSError):  # Windows: another process has loaded an equal file
                built.replace(final)
            for broken in (path for path in place.glob("*.so") if path.stem != _digest(path)):
                broken.unlink(missing_ok=True)
            torch.ops.load_library(str(final))
        except OSError as error:
            raise Failure(
                f"the built library does not load ({first_line(error)})",
                "set FAST_VIDEO_VAE_CACHE to another folder",
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)


CPU = Library()


def _switched_off() -> str:
    """Return the reason why the user has disabled the library; "": it is enabled."""
    if os.environ.get("FAST_VIDEO_VAE_NATIVE") == "0":
        return "FAST_VIDEO_VAE_NATIVE=0 disables the native kernels"
    return ""


def _loads(place: Path) -> bool:
    """Load the library in `place` if it is complete and for this machine."""
    # The file is named after its hash, because mapping a truncated file can kill the process.
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
