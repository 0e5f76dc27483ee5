"""Compiled kernels, kept on disk under a hash of all that they are made from.

A file is the hash of its binary, followed by the binary, so that a cut or damaged one is found and
made again. Files of other versions stay, because several installations can share the folder.
"""

import functools
import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from .. import cache
from ..errors import log_once
from .compiler import Compiler

_logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parents[1] / "csrc" / "cuda"

# A binary has 5 to 100 KB; a larger file is not ours.
_MOST_BYTES = 16 << 20

_HASH_BYTES = hashlib.sha256().digest_size


def binary(
    compiler: Compiler, source: str, constants: Mapping[str, object], architecture: str
) -> bytes:
    """Return the compiled kernels of `source`, from the disk or from the compiler."""
    given = options(constants, architecture)
    path = cache.folder("cuda") / f"{source}-{key(source, (*given, compiler.version))}.bin"
    found = _read(path)
    if found is None:
        text = (SOURCES / f"{source}.cu").read_text(encoding="utf-8")
        found = compiler.compile(text, headers(), given, f"{source}.cu").code
        _write(path, found)
    return found


def options(constants: Mapping[str, object], architecture: str) -> list[str]:
    """Return the compiler's options for `constants`, macros by name, and an `architecture`."""
    macros = (f"-DFVV_{name}={value}" for name, value in sorted(constants.items()))
    return [architecture, "-std=c++17", *macros]


def key(source: str, options: tuple[str, ...]) -> str:
    """Return the hash of all that a binary is made from; a source can include all headers."""
    texts = (text for header in headers().items() for text in header)
    return cache.key_of((*options, *texts), [SOURCES / f"{source}.cu"])


def kernels(source: str) -> list[str]:
    """Return the names of the kernels in the file `source`."""
    text = (SOURCES / f"{source}.cu").read_text(encoding="utf-8")
    return re.findall(r"^FVV_KERNEL (\w+)\(", text, re.MULTILINE)


@functools.cache
def headers() -> Mapping[str, str]:
    """Return the headers of the kernels by name."""
    paths = sorted(SOURCES.glob("*.cuh"))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def _read(path: Path) -> bytes | None:
    """Return the binary in a file; None: there is none, or it is damaged."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        content = path.read_bytes()
    except OSError as error:
        _logger.debug("%s is not read: %s", path, error)
        return None
    found = content[_HASH_BYTES:]
    return found if found and content[:_HASH_BYTES] == hashlib.sha256(found).digest() else None


def _write(path: Path, found: bytes) -> None:
    try:
        cache.replace(path, hashlib.sha256(found).digest() + found)
    except OSError as error:
        if _read(path) is not None:
            return  # another process has written it, and Windows does not replace an open file
        log_once(
            f"{path.parent} is not writable ({error.strerror}), so every start compiles its "
            "kernels again; set FAST_VIDEO_VAE_CACHE to a writable folder"
        )
