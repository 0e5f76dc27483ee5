"""The launches of the ops in Triton; their files import Triton, so they are loaded when needed."""

import functools
import importlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ..backends import SIGNATURES, Launch
from ..constraints import DTYPES, refuse_dtype, refuse_subclass
from ..errors import Refusal, first_line, log_once
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
    try:
        modules = [importlib.import_module(f".{file}", __package__) for file in _FILES]
    except Exception as error:  # whatever a broken installation raises
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            reason = "triton is not installed"
            advice = "pip install triton; on Windows: triton-windows"
        else:
            reason = f"triton does not load ({type(error).__name__}: {first_line(error)})"
            advice = "install a Triton that matches PyTorch"
        log_once(f"{reason}, so other kernels are used; its own can be faster: {advice}")
        raise Refusal(reason) from error
    return {op: getattr(each, op) for each in modules for op in SIGNATURES if hasattr(each, op)}
