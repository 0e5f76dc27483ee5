"""Every op in plain PyTorch: the backend that supports every call and defines the results.

The ops run over blocks that fit a core's cache, so that the passes of a formula read it, and write
into the caller's buffer, because fresh pages cost as much as the arithmetic.
"""

from collections.abc import Mapping

from torch import Tensor

from ..backends import SIGNATURES, Launch
from . import attention, convolution, layout, norms
from .convolution import fuses as fuses

_MODULES = attention, convolution, layout, norms
_LAUNCHES: Mapping[str, Launch] = {
    op: getattr(each, op) for each in _MODULES for op in SIGNATURES if hasattr(each, op)
}


def refuse(_: Tensor) -> None:
    """Refuse nothing."""


def launches() -> Mapping[str, Launch]:
    """Return the launches by op."""
    return _LAUNCHES
