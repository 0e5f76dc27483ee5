"""Section `copy`: the bandwidth and FLOP rate of the device, the limits of the other sections."""

import functools

import torch

from .rows import Case, Results
from .session import Session

_DTYPES = {str(x)[6:]: x for x in (torch.bfloat16, torch.float16, torch.float32)}


def cases(session: Session) -> list[Case]:
    """Return copies of three sizes and products in three dtypes."""
    sizes = session.pick((1 << 26, 1 << 28, 1 << 30), (1 << 18, 1 << 20, 1 << 22))
    copies = {f"{nbytes / 2**20:g} MiB": nbytes for nbytes in sizes}
    size = session.pick(8192, 256)
    products = functools.partial(_products, session, size)
    return [
        Case("copy", tuple(copies), functools.partial(_copies, session, copies)),
        Case(f"product of {size} x {size}", tuple(_DTYPES), products),
    ]


def _copies(session: Session, sizes: dict[str, int]) -> Results:
    for kind, nbytes in sizes.items():
        rate = session.copied(nbytes)
        yield kind, {"ms": 2e3 * nbytes / rate, "gb_per_s": rate / 1e9}


def _products(session: Session, size: int) -> Results:
    for kind, dtype in _DTYPES.items():
        rate = session.multiplied(size, dtype)
        yield kind, {"ms": 2e3 * size**3 / rate, "tflops": rate / 1e12}
