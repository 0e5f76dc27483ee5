"""The latent formats of ComfyUI, and the colors of latents by their factors.

A LATENT is raw; factors are for latents as the diffusion model sees them, which a format's
`process_in` makes of it. Facts about ComfyUI here are from comfy/latent_formats.py of 0.33.
"""

import inspect
import logging
from typing import Any

import comfy.latent_formats
from comfy.latent_formats import LatentFormat
from latent_preview import Latent2RGBPreviewer
from PIL.Image import Image
from torch import Tensor

_logger = logging.getLogger(__name__)

# Formats that channels are taken for, because a LATENT does not name its model. ComfyUI has others
# with 16: of images SD3 and Flux, of videos HunyuanVideo, Cosmos, CogVideoX and SeedVR2.
WAN = {16: comfy.latent_formats.Wan21, 48: comfy.latent_formats.Wan22}


def format_of(latent: Tensor) -> LatentFormat:
    """Return the format of a raw latent, Wan's first, or raise an error if it is not clear."""
    channels = latent.shape[1]
    if channels in WAN:
        if latent.ndim == 4 and channels == 16:
            _logger.warning(
                "Fast Video VAE: the colors of this preview are those of Wan; a latent of images "
                "with 16 channels is often one of SD3 or Flux, whose colors differ"
            )
        return WAN[channels]()
    kinds = [kind for _, kind in inspect.getmembers(comfy.latent_formats, inspect.isclass)]
    known = [kind() for kind in kinds if issubclass(kind, LatentFormat)]
    fitting = [each for each in known if has_factors(each, channels)]
    fitting = [each for each in fitting if each.latent_dimensions == latent.ndim - 2]
    # Formats of related models can have the same factors.
    found = {repr(each.latent_rgb_factors): each for each in fitting}
    if len(found) != 1:
        names = ", ".join(sorted(type(each).__name__ for each in found.values()))
        reason = f"formats with different colors have them: {names}" if found else "none has them"
        raise ValueError(f"got {channels} channels; expected those of a known format, but {reason}")
    return next(iter(found.values()))


def has_factors(latent_format: LatentFormat, channels: int) -> bool:
    """Return whether `latent_format` has factors for `channels`, without a change of shape."""
    factors = latent_format.latent_rgb_factors
    reshaped = getattr(latent_format, "latent_rgb_factors_reshape", None) is not None
    return factors is not None and len(factors) == channels and not reshaped


def colors(latent_format: Any, x: Tensor) -> list[Image]:  # noqa: ANN401, any format
    """Return ComfyUI's pictures of a latent as the model sees it, one for each of its frames."""
    factors, bias = latent_format.latent_rgb_factors, latent_format.latent_rgb_factors_bias
    show = Latent2RGBPreviewer(factors, bias).decode_latent_to_preview
    return [show(each.float()) for each in (x.split(1, 2) if x.ndim == 5 else x.split(1))]
