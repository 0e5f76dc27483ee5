"""Compiled kernels, kept on disk under a hash of all that they are made from."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from .. import cache
from .compiler import Compiler

SOURCES = Path(__file__).parents[1] / "csrc" / "cuda"


def binary(
    compiler: Compiler, source: str, constants: Mapping[str, object], architecture: str
) -> bytes:
    """Return the compiled kernels of `source`, from the disk or from the compiler."""
    given = options(constants, architecture)
    place = cache.folder("cuda") / f"{source}-{key(source, (*given, compiler.version))}"
    for path in cache.whole(place, "*.bin"):
        return path.read_bytes()
    found = compiler.compile(_text(source), headers(), given, f"{source}.cu").code
    cache.keep(place / f"{cache.digest(found)}.bin", found, "compiles its kernels")
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
    return re.findall(r"^FVV_KERNEL (\w+)\(", _text(source), re.MULTILINE)


@functools.cache
def headers() -> Mapping[str, str]:
    """Return the headers of the kernels by name."""
    paths = sorted(SOURCES.glob("*.cuh"))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def _text(source: str) -> str:
    return (SOURCES / f"{source}.cu").read_text(encoding="utf-8")
