"""The backends: their names, their launches, and the one that a caller has selected.

The wrapper of an op in `kernels/__init__.py` checks a call, makes memory for its result and lays
its vectors out. A backend has a launch for each op that it supports: a function of the arguments in
`SIGNATURES`, in this order, which returns the result. A launch that does not support a call raises
`Refusal` with the reason before it writes anything, and the next backend is asked.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from torch import Tensor

_Value = TypeVar("_Value")

Launch = Callable[..., Tensor]

# Fastest first. The reference accepts every call that passes the checks of the op.
ORDER = ("triton", "cuda", "native", "reference")

# Kinds of GPUs (`devices.device_kind`) that have kernels.
TRIED = ("nvidia", "amd", "intel")

# The candidates of the convolutions; those of our own serve on a GPU once they are built and right.
CONVOLUTIONS = ("hopper", "triton", "aten", "sliced", "reference")
OWN_CONVOLUTIONS = ("hopper", "triton")

# The library's own first.
CONVOLUTION_ORDER = ("aten", "reference")

# The candidates of `int8_conv3d`.
INT8_ORDER = ("triton", "aten", "reference")

# On Apple GPUs `conv3d` runs at 7 to 9 % of `conv2d` (pytorch/pytorch#192213), and in 16 bits some
# versions of macOS lack it.
SLICED_ORDER = ("sliced", *CONVOLUTION_ORDER)

_CODED = ("tail", "out", "codes", "saturated")
_TERMS = ("bias", "residual", "residual_bias")

# The arguments of the launches. Vectors are `C` values in any shape, dense, in float32 or in the
# dtype of the activations. `out` is memory for the result; it is None for a convolution whose
# library makes it.
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v"),
    "average_down": ("x", "out", "times", "size"),
    "bias_residual": ("x", *_TERMS, "out"),
    "conv3d": ("x", "weight", *_TERMS, "gamma", "tail", "out", "stride", "padding", "tile"),
    "frames_to_images": ("frames", "out", "patch", "order"),
    "group_norm_silu": (
        "x", "weight", "bias", "statistics", *_CODED, "groups", "eps", "silu", "border",
    ),
    "group_norm_statistics": ("x", "out", "groups", "eps"),
    "int8_conv3d": ("x", "weight", "scale", *_TERMS, "out", "dtype"),
    "interleave_time": ("x", "out", "phases"),
    "merge_phases": ("grid", "source", "bias", "out", "times"),
    "pixel_shuffle_3d": ("x", "out", "size", "order"),
    "rms_norm_silu": ("x", "gamma", "bias", *_CODED, "silu", "border"),
    "silu_mul": ("x", "gate", "out"),
}  # fmt: skip


class Kernel(NamedTuple):
    """A convolution of ours."""

    backend: str
    tile: int  # the number of its tile; of the library's, 1: in contiguous memory


def convolution_order(kind: str, taps: int) -> tuple[str, ...]:
    """Return the candidates but ours for a kind of device, and taps in `taps` dimensions."""
    return SLICED_ORDER if kind == "apple" and taps == 3 else CONVOLUTION_ORDER


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
