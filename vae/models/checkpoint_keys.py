"""Convert the key names of a checkpoint to those of Wan."""

import re
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from ..checkpoint_io.networks import Network, check_different
from .config import SEEDVR2_KEY, WAN_KEY

# The same tensor as `WAN_KEY`.
_DIFFUSERS_KEY = "decoder.mid_block.resnets.0.norm1.gamma"

# The VAEs of this package.
VAES = Network(
    (WAN_KEY, _DIFFUSERS_KEY, SEEDVR2_KEY),
    ("encoder.", "decoder.", "conv1.", "conv2.", "quant_conv.", "post_quant_conv."),
)

# diffusers' names of the Wan 2.1 layout (AutoencoderKLWan, AutoencoderKLQwenImage; its script
# convert_wan_to_diffusers.py has the table) as patterns, with Wan's names. The decoder's blocks are
# numbered afterwards.
_DIFFUSERS_NAMES = [
    (r"\.norm1\.gamma$", ".residual.0.gamma"),
    (r"\.conv1\.(weight|bias)$", r".residual.2.\1"),
    (r"\.norm2\.gamma$", ".residual.3.gamma"),
    (r"\.conv2\.(weight|bias)$", r".residual.6.\1"),
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

# Tensors without a temporal dimension in every VAE.
_FLAT = re.compile(r"\.(resample\.1|to_qkv|proj)\.weight$|\.1\.norm\.gamma$")

_Value = TypeVar("_Value")


def to_wan_keys(state: Mapping[str, _Value]) -> dict[str, _Value]:
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


def with_time(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the temporal dimension of one tap to the causal convolutions of an image VAE.

    diffusers stores Qwen-Image 2.1 with 2D convolutions, ComfyUI with 3D ones. Wan 2.1 for images
    has the last tap of its convolutions only; `time_conv`, which no image uses, can have three.
    """
    head = weights.get("decoder.head.2.weight")
    if head is None or head.shape[2:-2] not in ((), (1,)):
        return weights

    def timed(key: str, value: Tensor) -> Tensor:
        lacks = value.ndim == (4 if key.endswith(".weight") else 3 if key.endswith(".gamma") else 0)
        if lacks and not _FLAT.search(key):
            return value.unsqueeze(2)
        return value[:, :, -1:] if ".time_conv.weight" in key and value.ndim == 5 else value

    return {key: timed(key, value) for key, value in weights.items()}
