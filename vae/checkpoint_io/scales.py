"""Scales of weights in float8: `x.weight` is multiplied by `x.weight_scale` or `x.scale_weight`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels import shown

_OF_WEIGHTS = ("weight_scale", "scale_weight")
# For activations in float8, which this package does not have, and the name of the format.
_UNUSED = ("input_scale", "scale_input", "comfy_quant")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def with_scales(network: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return each tensor of a network with its scale, if it has one."""
    scales: dict[str, Tensor] = {}
    for key, value in network.items():
        base, _, end = key.rpartition(".")
        weight = f"{base}.weight"
        if end in _OF_WEIGHTS and scales.setdefault(weight, value) is not value:
            raise ValueError(f"{shown(weight)} has two scales; expected one")
    left = {
        f"{base}.{end}"
        for base in (weight.rpartition(".")[0] for weight in scales if weight in network)
        for end in (*_OF_WEIGHTS, *_UNUSED)
    }
    return {key: (value, scales.get(key)) for key, value in network.items() if key not in left}


def scaled(key: str, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return a weight times its scale: a number, or one for each of its outputs."""
    if scale is None:
        return weight
    if not weight.is_floating_point() or weight.itemsize > 1 or scale.dtype not in _DTYPES:
        raise ValueError(
            f"{shown(key)} is {weight.dtype} with a scale in {scale.dtype}; expected float8 with "
            "one in float32"
        )
    count = weight.shape[0]
    if scale.numel() != 1 and (scale.numel() != count or scale.shape[0] != count):
        raise ValueError(
            f"{shown(key)} has scales {list(scale.shape)}; expected one, or one for each of its "
            f"{count} outputs"
        )
    return weight.float() * scale.float().reshape(-1, *[1] * (weight.ndim - 1))
