"""The ops of this backend; each loads the file of its launch on the first call."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..constraints import refuse_dtype, refuse_subclass
from ..errors import Refusal
from . import runtime


def _op(file: str, name: str) -> Callable[..., Tensor]:
    """Return an op whose first tensor is the activation."""

    def run(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401, those of the op
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        x = tensors[0]
        runtime.refuse_device(x.device)
        refuse_dtype(x)
        for tensor in tensors:
            refuse_subclass(tensor)
        if not x.numel():
            raise Refusal("the tensor is empty")
        launches = importlib.import_module(f".{file}", __package__)
        return getattr(launches, name)(*args, **kwargs)

    return run


attention = _op("attention", "attention")
average_down = _op("layout", "average_down")
bias_residual = _op("rows", "bias_residual")
frames_to_images = _op("layout", "frames_to_images")
group_norm_silu = _op("norms", "group_norm_silu")
group_norm_statistics = _op("norms", "group_norm_statistics")
interleave_time = _op("layout", "interleave_time")
merge_phases = _op("layout", "merge_phases")
pixel_shuffle_3d = _op("layout", "pixel_shuffle_3d")
rms_norm_silu = _op("norms", "rms_norm_silu")
silu_mul = _op("rows", "silu_mul")
