"""Section `copy`: what the device moves and multiplies at most, which the other sections go by."""

import functools
from collections.abc import Iterator

import torch

from .rows import Case, Values
from .session import Session


def cases(session: Session) -> list[Case]:
    """Copies of three sizes, and products in three dtypes."""
    sizes = session.pick((1 << 26, 1 << 28, 1 << 30), (1 << 18, 1 << 20, 1 << 22))
    found = []
    for nbytes in sizes:
        name = f"copy of {nbytes / 2**20:g} MiB"
        found.append(Case((name,), functools.partial(_copy, session, name, nbytes)))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        size = session.pick(8192, 256)
        name = f"product of {size} x {size}, {str(dtype).removeprefix('torch.')}"
        found.append(Case((name,), functools.partial(_product, session, name, size, dtype)))
    return found


def _copy(session: Session, name: str, nbytes: int) -> Iterator[tuple[str, Values]]:
    rate = session.copied(nbytes)
    yield name, {"ms": 2e3 * nbytes / rate, "gb_per_s": rate / 1e9}


def _product(
    session: Session, name: str, size: int, dtype: torch.dtype
) -> Iterator[tuple[str, Values]]:
    rate = session.multiplied(size, dtype)
    yield name, {"ms": 2e3 * size**3 / rate, "tflops": rate / 1e12}
