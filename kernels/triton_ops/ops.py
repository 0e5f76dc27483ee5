"""The launches of the ops in Triton; their files import Triton, so they are loaded when needed."""

import functools
import importlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ..backends import SIGNATURES, Launch
from ..constraints import DTYPES, refuse_dtype, refuse_subclass
from ..errors import Refusal
from .runtime import refuse_device, require

# The files with launches.
_FILES = ("attention", "convolution", "group_norm", "int8_convolution", "layout", "rows")


def refuse(x: Tensor) -> None:
    """Refuse devices and dtypes without kernels, and devices on which Triton does not work."""
    refuse_device(x.device, x.dtype)
    refuse_dtype(x, (*DTYPES, torch.int8))
    refuse_subclass(x)
    if not x.numel():
        raise Refusal("the tensor is empty")
    require(x.device)


@functools.cache
def launches() -> Mapping[str, Launch]:
    """Return the launches by op."""
    modules = [importlib.import_module(f".{file}", __package__) for file in _FILES]
    return {op: getattr(each, op) for each in modules for op in SIGNATURES if hasattr(each, op)}
