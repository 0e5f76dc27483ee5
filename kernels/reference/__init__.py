"""Every op in plain PyTorch: the backend that supports every call and defines the results.

The ops run over blocks that fit a core's cache, so that the passes of a formula read it, and write
into the caller's buffer, because fresh pages cost as much as the arithmetic.
"""

from collections.abc import Mapping

from torch import Tensor

from ..backends import Launch
from . import attention, convolution, layout, norms
from .convolution import fuses as fuses

_LAUNCHES: Mapping[str, Launch] = {
    "attention": attention.attention,
    "average_down": layout.average_down,
    "bias_residual": norms.bias_residual,
    "conv3d": convolution.conv3d,
    "frames_to_images": layout.frames_to_images,
    "group_norm_silu": norms.group_norm_silu,
    "group_norm_statistics": norms.group_norm_statistics,
    "int8_conv3d": convolution.int8_conv3d,
    "interleave_time": layout.interleave_time,
    "merge_phases": layout.merge_phases,
    "pixel_shuffle_3d": layout.pixel_shuffle_3d,
    "rms_norm_silu": norms.rms_norm_silu,
    "silu_mul": norms.silu_mul,
}


def refuse(_: Tensor) -> None:
    """Refuse nothing."""


def launches() -> Mapping[str, Launch]:
    """Return the launches by op."""
    return _LAUNCHES
