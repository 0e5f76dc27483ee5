"""Every op in plain PyTorch: the backend that supports every call and defines the results.

The ops run over blocks that fit a core's cache, so that the passes of a formula read it, and write
into the caller's buffer, because fresh pages cost as much as the arithmetic.
"""

from .attention import attention
from .convolution import conv2d, conv3d, int8_conv3d
from .convolution import fuses as fuses
from .layout import average_down, frames_to_images, interleave_time, merge_phases, pixel_shuffle_3d
from .norms import bias_residual, group_norm_silu, group_norm_statistics, rms_norm_silu, silu_mul

__all__ = [
    "attention",
    "average_down",
    "bias_residual",
    "conv2d",
    "conv3d",
    "frames_to_images",
    "group_norm_silu",
    "group_norm_statistics",
    "int8_conv3d",
    "interleave_time",
    "merge_phases",
    "pixel_shuffle_3d",
    "rms_norm_silu",
    "silu_mul",
]
