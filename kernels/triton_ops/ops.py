"""The launches of the ops in Triton; their files import Triton, so they are loaded when needed."""

import functools
import importlib
import importlib.util
from collections.abc import Mapping

import torch
from torch import Tensor

from ..backends import SIGNATURES, Launch
from ..constraints import DTYPES, refuse_dtype, refuse_subclass
from ..errors import Refusal, log_once
from .runtime import refuse_device

# The files with launches.
_FILES = ("convolution", "int8_convolution", "layout", "norms", "rows")


def refuse(x: Tensor) -> None:
    """Refuse devices and dtypes without kernels."""
    refuse_device(x.device, x.dtype)
    refuse_dtype(x, (*DTYPES, torch.int8))
    refuse_subclass(x)
    if not x.numel():
        raise Refusal("the tensor is empty")


@functools.cache
def launches() -> Mapping[str, Launch]:
    """Return the launches by op, or refuse without Triton."""
    if importlib.util.find_spec("triton") is None:
        log_once(
            "Triton is not installed, so other kernels are used; its own can be faster: "
            "pip install triton (on Windows: triton-windows)"
        )
        raise Refusal("triton is not installed")
    modules = [importlib.import_module(f".{file}", __package__) for file in _FILES]
    return {op: getattr(each, op) for each in modules for op in SIGNATURES if hasattr(each, op)}
