"""Build the C++ sources of `csrc/cpu` on the user's machine, once.

The library is cached under a hash of its inputs: sources, flags and the version of torch, so a
stale one is never loaded. A failure is logged once and remembered, and another backend runs.

Environment:
    FAST_VIDEO_VAE_NATIVE: 0 disables the CPU kernels.
"""

import logging
import os
import platform
import sys
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
_lock = threading.RLock()


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
        if self._job is None:
            with _lock:
                if self._job is None and self._settle(build=False):
                    self._job = background.DONE
                elif self._job is None:
                    self._job = background.submit("the build of the CPU kernels", self._settle)
        return self._job

    def load(self) -> None:
        """Load the library, or build it first and wait for that; refuse always with one reason."""
        self._settle()
        if self._outcome:
            raise Refusal(self._outcome)

    def folder(self) -> Path:
        """Return the cache folder of this library."""
        return cache.folder("native") / self.key()

    def key(self) -> str:
        """Return the hash of everything that the library is built from."""
        abi = str(torch.compiled_with_cxx11_abi())
        texts = torch.__version__, abi, *compiler.flags(), sys.platform, platform.machine()
        return cache.key_of(texts, sorted(self.sources.iterdir()))

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
            if ops.key() == self.key():
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
        command, place = compiler.command(), self.folder()
        try:
            with cache.building(place.parent) as work:
                _logger.info("Fast Video VAE: building the CPU kernels once, about half a minute")
                sources = sorted(self.sources.glob("*.cpp"))
                built = compiler.build(command, sources, work, place.name)
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
