"""The launches of the ops in CUDA C++."""

import functools
from collections.abc import Mapping

from torch import Tensor

from ..backends import SIGNATURES, Launch
from ..constraints import refuse_dtype, refuse_subclass
from ..errors import Refusal
from . import attention, layout, norms, rows, runtime


def refuse(x: Tensor) -> None:
    """Refuse devices and dtypes without kernels."""
    runtime.refuse_device(x.device)
    refuse_dtype(x)
    refuse_subclass(x)
    if not x.numel():
        raise Refusal("the tensor is empty")


@functools.cache
def launches() -> Mapping[str, Launch]:
    """Return the launches by op."""
    modules = attention, layout, norms, rows
    return {op: getattr(each, op) for each in modules for op in SIGNATURES if hasattr(each, op)}
