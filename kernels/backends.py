"""The names of the backends, and the backend that a caller has selected."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_Value = TypeVar("_Value")

# Fastest first. The reference accepts every call that passes the checks of the op.
ORDER = ("triton", "cuda", "native", "reference")

# Kinds of GPUs (`devices.device_kind`) that have kernels.
TRIED = ("nvidia", "amd", "intel")

CONVOLUTIONS_OPS = ("conv2d", "conv3d", "int8_conv3d")

# The candidates of the convolutions.
CONVOLUTIONS = ("hopper", "triton", "aten", "sliced", "reference")

# Those of our own, which serve on a GPU once they are built and right.
OWN_CONVOLUTIONS = ("hopper", "triton")

# The library's own first.
CONVOLUTION_ORDER = ("aten", "reference")

# The candidates of `int8_conv3d`.
INT8_ORDER = ("triton", "aten", "reference")

# On Apple GPUs `conv3d` runs at 7 to 9 % of `conv2d` (pytorch/pytorch#192213), and in 16 bits some
# versions of macOS lack it.
SLICED_ORDER = ("sliced", *CONVOLUTION_ORDER)


def convolution_order(op: str, kind: str) -> tuple[str, ...]:
    """Return the candidates of `conv2d` or `conv3d` other than ours; the reference is last."""
    return SLICED_ORDER if kind == "apple" and op == "conv3d" else CONVOLUTION_ORDER


_forced: ContextVar[str | None] = ContextVar("forced backend", default=None)


@contextmanager
def within(variable: ContextVar[_Value], value: _Value) -> Iterator[_Value]:
    """Set a `variable` of this thread to `value` until the end of the block."""
    before = variable.get()
    variable.set(value)
    try:
        yield value
    finally:
        variable.set(before)  # no token: a generator can end in another context


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run ops on one of `ORDER` or `CONVOLUTIONS` in this thread, without fallback."""
    # A backend without any convolution does not restrict the convolutions, and a candidate that has
    # only these does not restrict the other ops.
    known = tuple(dict.fromkeys((*ORDER, *CONVOLUTIONS)))
    if name not in known:
        raise ValueError(f"backend is {name!r}; expected one of {', '.join(known)}")
    with within(_forced, name):
        yield


def forced() -> str | None:
    """Return the backend that `use_backend` has selected; None: any."""
    return _forced.get()
