"""The ops in C++ for the CPU; `csrc/cpu` has the kernels, and `build.py` builds them.

Each launch runs an op of `torch.ops.fast_video_vae`, which writes into its last argument.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import shapes
from ..backends import Launch
from ..constraints import is_dense, refuse_dtype, refuse_video
from ..errors import Refusal
from .build import CPU


def refuse(x: Tensor) -> None:
    """Refuse devices and dtypes that the kernels do not support."""
    if x.device.type not in ("cpu", "meta"):
        raise Refusal(f"the tensors are on {x.device.type}; native needs the CPU")
    refuse_dtype(x)


def launches() -> Mapping[str, Launch]:
    """Return the launches by op; attention is PyTorch's fused kernel."""
    return _LAUNCHES


def _rms_norm_silu(
    x: Tensor,
    gamma: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    out: Tensor,
    codes: Tensor | None,
    saturated: Tensor | None,
    silu: bool,
    border: int,
) -> Tensor:
    ends = tail, border, codes, saturated, out
    return _run("rms_norm_silu", x, _float(gamma), silu, _float(bias), *ends)


def _group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor | None,
    tail: Tensor | None,
    out: Tensor,
    codes: Tensor | None,
    saturated: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    border: int,
) -> Tensor:
    given = None if statistics is None else statistics.contiguous()
    options, ends = (groups, eps, silu, given), (tail, border, codes, saturated, out)
    return _run("group_norm_silu", x, _float(weight), _float(bias), *options, *ends)


def _pixel_shuffle_3d(x: Tensor, out: Tensor, size: tuple[int, int, int], order: str) -> Tensor:
    if out.dtype != x.dtype or out.device != x.device:
        raise Refusal("out has another dtype or device")
    refuse_video("out", out)
    return _run("pixel_shuffle_3d", x, size, order, out)


def _frames_to_images(frames: Tensor, out: Tensor, patch: int, order: str) -> Tensor:
    if out.device != frames.device:
        raise Refusal("out is on another device")
    if not is_dense(out, -3, -2, -1):
        raise Refusal("the pixels of out are not dense")
    if out.dtype not in (torch.float32, torch.uint8, torch.uint16):
        name = str(out.dtype).removeprefix("torch.")
        raise Refusal(f"images are {name}; native writes float32, uint8 and uint16")
    return _run("frames_to_images", frames, patch, order, shapes.white(out.dtype), out)


_LAUNCHES: Mapping[str, Launch] = {
    "average_down": lambda x, out, times, size: _run("average_down", x, times, size, out),
    "bias_residual": lambda x, bias, residual, other, out: _run(
        "bias_residual", x, _float(bias), residual, _float(other), out
    ),
    "frames_to_images": _frames_to_images,
    "group_norm_silu": _group_norm_silu,
    "group_norm_statistics": lambda x, out, groups, eps: _run(
        "group_norm_statistics", x, groups, eps, out
    ),
    "interleave_time": lambda x, out, phases: _run("interleave_time", x, phases, out),
    "merge_phases": lambda grid, source, bias, out, times: _run(
        "merge_phases", grid, source, times, _float(bias), out
    ),
    "pixel_shuffle_3d": _pixel_shuffle_3d,
    "rms_norm_silu": _rms_norm_silu,
    "silu_mul": lambda x, gate, out: _run("silu_mul", x, gate, out),
}


def _run(op: str, *args: Any) -> Tensor:  # noqa: ANN401, those of the op
    """Run an op of the library, which writes into its last argument."""
    CPU.require()
    getattr(torch.ops.fast_video_vae, op).default(*args)
    return args[-1]


def _float(values: Tensor | None) -> Tensor | None:
    """Return a vector in float32, for the kernels."""
    return None if values is None else values.float()
