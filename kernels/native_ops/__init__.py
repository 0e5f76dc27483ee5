"""The ops in C++ for the CPU; `csrc/cpu` has the kernels, and `build.py` builds them.

Each launch runs an op of `torch.ops.fast_video_vae`, which takes the arguments in `SIGNATURES`.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..backends import SIGNATURES, Launch
from ..constraints import is_dense, refuse_dtype, refuse_target, refuse_video
from ..errors import Refusal
from .build import CPU

# Parameters, which the kernels read in float32.
_WIDE = ("gamma", "weight", "bias", "residual_bias", "statistics")

_IMAGES = (torch.float32, torch.uint8, torch.uint16)


def refuse(x: Tensor) -> None:
    """Refuse devices and dtypes that the kernels do not support."""
    if x.device.type not in ("cpu", "meta"):
        raise Refusal(f"the tensors are on {x.device.type}; native needs the CPU")
    refuse_dtype(x)


@functools.cache
def launches() -> Mapping[str, Launch]:
    """Return the launches by op; attention is PyTorch's fused kernel."""
    ops = SIGNATURES.keys() - {"attention", "conv3d", "int8_conv3d"}
    return {op: functools.partial(_run, op) for op in ops}


def _run(op: str, *args: Any) -> Tensor:  # noqa: ANN401, those of `SIGNATURES`
    names = SIGNATURES[op]
    out = args[names.index("out")]
    if op in ("pixel_shuffle_3d", "frames_to_images"):
        _refuse_converted(op, args[0], out)
    CPU.require()
    given = (
        each.float().contiguous() if name in _WIDE and each is not None else each
        for name, each in zip(names, args, strict=True)
    )
    getattr(torch.ops.fast_video_vae, op).default(*given)
    return out


def _refuse_converted(op: str, x: Tensor, out: Tensor) -> None:
    """Refuse a result of an op that converts: it can have any device, dtype and strides."""
    refuse_target(out, x, (x.dtype,) if op == "pixel_shuffle_3d" else (out.dtype,))
    if op == "pixel_shuffle_3d":
        refuse_video("out", out)
    elif not is_dense(out, -3, -2, -1):
        raise Refusal("the pixels of out are not dense")
    elif out.dtype not in _IMAGES:
        name = str(out.dtype).removeprefix("torch.")
        raise Refusal(f"images are {name}; native writes float32, uint8 and uint16")
