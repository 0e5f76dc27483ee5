"""Memory of the host that was freed, and that the process keeps."""

import ctypes
import functools
from collections.abc import Callable


def trim_heap() -> None:
    """Return what `malloc` keeps of freed memory to the system.

    glibc keeps the free memory below its topmost block: 300 of 600 MiB after the decode of a video.
    Other libraries return theirs by themselves, or cannot be asked.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The function of glibc; None where another library is the system's."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # Windows has no library without a name
        return None
