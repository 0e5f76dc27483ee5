"""Convert the key names of a checkpoint to those of Wan, and its weights to plain ones."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels import shown
from ..checkpoint_io.networks import Network, check_different
from .config import SEEDVR2_KEY, WAN_KEY

# Hunyuan's VAEs have the other names of the decoder too.
_DIFFUSERS_KEY = "decoder.mid_block.attentions.0.to_qkv.weight"

# Norms of an encoder, by all names of Wan.
ENCODER_NORM = re.compile(r"\.(downsamples|down_blocks)\.0\.(\w+\.)*gamma$")

VAES = Network(
    (WAN_KEY, _DIFFUSERS_KEY, SEEDVR2_KEY),
    ("encoder.", "decoder.", "conv1.", "conv2.", "quant_conv.", "post_quant_conv."),
)

# diffusers' names of the Wan 2.1 layout (AutoencoderKLWan, AutoencoderKLQwenImage; its script
# convert_wan_to_diffusers.py has the table) as patterns, with Wan's names. The decoder's blocks are
# numbered afterwards.
_DIFFUSERS_NAMES = [
    (r"\.norm1\.gamma$", ".residual.0.gamma"),
    (r"\.conv1\.", ".residual.2."),
    (r"\.norm2\.gamma$", ".residual.3.gamma"),
    (r"\.conv2\.", ".residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
    (r"\.conv_in\.", ".conv1."),
    (r"\.norm_out\.gamma$", ".head.0.gamma"),
    (r"\.conv_out\.", ".head.2."),
    (r"\.mid_block\.resnets\.0\.", ".middle.0."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
    (r"\.mid_block\.resnets\.1\.", ".middle.2."),
    (r"^encoder\.down_blocks\.(\d+)\.", r"encoder.downsamples.\1."),
]

# The same for the Wan 2.2 layout, which numbers the blocks per stage (AutoencoderKLWan with
# `is_residual`, AutoencoderKLQwenImage21).
_NESTED_NAMES = [
    (r"^encoder\.down_blocks\.(\d+)\.resnets\.", r"encoder.downsamples.\1.downsamples."),
    (r"^encoder\.down_blocks\.(\d+)\.downsampler\.", r"encoder.downsamples.\1.downsamples.2."),
    (r"^decoder\.up_blocks\.(\d+)\.resnets\.", r"decoder.upsamples.\1.upsamples."),
    (r"^decoder\.up_blocks\.(\d+)\.upsampler\.", r"decoder.upsamples.\1.upsamples.3."),
]


def to_wan_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the keys of a state dict to Wan's names; unknown keys stay as they are."""
    plain = dict(state)
    if _DIFFUSERS_KEY in plain:
        nested = any(".upsampler." in key for key in plain)
        names = {key: _from_diffusers(key, nested) for key in plain}
        check_different(names)
        plain = {names[key]: value for key, value in plain.items()}
    if not any(key.startswith("encoder.") for key in plain):
        # The quantisation convolution of an encoder that was removed.
        plain = {key: value for key, value in plain.items() if not key.startswith("conv1.")}
    return plain


def _from_diffusers(key: str, nested: bool) -> str:
    """Return Wan's name for diffusers' `key`; `nested`: in the Wan 2.2 layout."""
    for pattern, name in [*(_NESTED_NAMES if nested else []), *_DIFFUSERS_NAMES]:
        key = re.sub(pattern, name, key)
    match = re.match(r"decoder\.up_blocks\.(\d+)\.(resnets\.(\d+)|upsamplers\.0)\.(.*)", key)
    if match:
        stage, _, block, rest = match.groups()
        return f"decoder.upsamples.{4 * int(stage) + (3 if block is None else int(block))}.{rest}"
    return key


def take_scales(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the scales of float8 from `weights`; return them by the names of what they scale."""
    scales: dict[str, Tensor] = {}
    for key in list(weights):
        base, _, end = key.rpartition(".")
        weight = f"{base}.weight"
        is_first = weight in weights and weight not in scales
        if is_first and end in ("weight_scale", "scale_weight"):
            scales[weight] = weights.pop(key)
        elif f"{base}.weight" in weights and end in ("input_scale", "scale_input", "comfy_quant"):
            del weights[key]  # for activations in float8
    return scales


def scaled(key: str, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the weight `key` times its scale: one, or one for each of its outputs."""
    if weight.is_floating_point() and weight.itemsize > 1 and scale.numel() == 1 == scale.item():
        return weight
    count, dtypes = weight.shape[0], (torch.float32, torch.float16, torch.bfloat16)
    fits = scale.numel() == 1 or scale.shape[:1] == (count,) == (scale.numel(),)
    if not (fits and scale.dtype in dtypes and weight.is_floating_point() and weight.itemsize == 1):
        scales = f"scales {list(scale.shape)} in {scale.dtype}"
        expected = f"float8 with 1 or {count} floats"
        raise ValueError(f"{shown(key)} is {weight.dtype} with {scales}; expected {expected}")
    return weight.float() * scale.float().reshape(-1, *[1] * (weight.ndim - 1))
