"""The ops that Triton supports; each loads the file of its kernel on the first call.

General refusals come first, before that file imports Triton, and its own follow.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..constraints import DTYPES, refuse_dtype, refuse_subclass
from ..convolution.fused import fuses as fuses
from ..errors import Refusal
from .runtime import refuse_device, require


def _op(file: str, name: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Callable[..., Tensor]:
    """Return an op whose first tensor is the activation, in one of `dtypes`."""

    def run(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401, those of the op
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        refuse_device(x.device, x.dtype)
        refuse_dtype(x, dtypes)
        refuse_subclass(x)
        if not x.numel():
            raise Refusal("the tensor is empty")
        require(x.device)
        return getattr(_kernels(file), name)(*args, **kwargs)

    return run


@functools.cache
def _kernels(file: str) -> ModuleType:
    return importlib.import_module(f".{file}", __package__)


attention = _op("attention", "attention")
average_down = _op("layout", "average_down")
bias_residual = _op("rows", "bias_residual")
conv2d = conv3d = _op("convolution", "conv3d")
frames_to_images = _op("layout", "frames_to_images")
group_norm_silu = _op("group_norm", "group_norm_silu")
group_norm_statistics = _op("group_norm", "group_norm_statistics")
int8_conv3d = _op("int8_convolution", "int8_conv3d", (torch.int8,))
interleave_time = _op("layout", "interleave_time")
merge_phases = _op("layout", "merge_phases")
pixel_shuffle_3d = _op("layout", "pixel_shuffle_3d")
rms_norm_silu = _op("rows", "rms_norm_silu")
silu_mul = _op("rows", "silu_mul")
