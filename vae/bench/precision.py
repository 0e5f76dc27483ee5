"""Measurement of what int8 costs: decodes in bfloat16 and with int8 against one in float32."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from ..model import VideoVAE
from ..models.config import VAEConfig
from ..streaming.int8.layers import Int8Layers, probe
from ..streaming.int8.settings import AUTO, INT8
from ..streaming.options import AUTOMATIC, StreamOptions
from ..streaming.precision import compute_dtype
from .compare import psnr
from .content import Clip, denormalized
from .precision_report import PrecisionReport

# Size of the clip without a given latent, in pixels.
_WIDTH, _HEIGHT = 384, 160

# Latents of that clip: the first, and two steps with a past.
_LATENTS = 3


def int8_layers(vae: VideoVAE) -> Int8Layers:
    """Return the convolutions that run in int8 with the dtype of a VAE, of any precision."""
    return _layers(_with_precision(vae, INT8), vae.int8_dtype())


def compare_precision(
    vae: VideoVAE, latent: Tensor | None = None, options: StreamOptions = AUTOMATIC
) -> PrecisionReport:
    """Decode a latent in float32, in bfloat16 and with int8, on the same weights.

    The VAE is not modified, and its own precision does not matter. Without a latent it is a smooth
    one. The PSNR has a peak of 2, of all frames clamped to [-1, 1].
    """
    plain, coded = _with_precision(vae, AUTO), _with_precision(vae, INT8)
    dtype = vae.int8_dtype(options)
    layers = _layers(coded, dtype)
    if latent is None:
        latent = smooth_latent(vae.config)
    exact = _images(plain, latent, replace(options, dtype=torch.float32))
    narrow = _images(plain, latent, replace(options, dtype=torch.bfloat16))
    mixed = _images(coded, latent, options)
    count, height, width = exact.shape[1:4]
    return PrecisionReport(
        Clip(width, height, len(exact) * count),
        dtype,
        compute_dtype(torch.bfloat16, vae.device),
        psnr(narrow, exact),
        psnr(mixed, exact),
        layers,
    )


def smooth_latent(config: VAEConfig) -> Tensor:
    """Draw a smooth latent of a small clip with the statistics of a VAE, the same in every call."""
    height, width = (side // config.spatial_compression for side in (_HEIGHT, _WIDTH))
    frames = 1 if config.temporal_compression == 1 else _LATENTS
    drawn = probe(config.latent_channels, max(height, width), frames=frames)
    return denormalized(config, drawn[..., :height, :width])


def _with_precision(vae: VideoVAE, precision: str) -> VideoVAE:
    """Return the same weights in another precision; the copy shares all tensors and layers."""
    twin = copy.copy(vae)
    twin.precision = precision
    return twin


def _layers(vae: VideoVAE, dtype: torch.dtype) -> Int8Layers:
    """Return the choice with other layers in `dtype`, also within inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return vae.int8_layers(dtype)


def _images(vae: VideoVAE, latent: Tensor, options: StreamOptions) -> Tensor:
    """Decode `latent` to images `[B, T, H, W, C]`, float32 in [0, 1] on the CPU."""
    pieces = [piece.cpu().float() for piece in vae.decode_stream(latent, options)]
    return torch.cat(pieces, dim=2).clamp(-1, 1).add(1).div(2).movedim(1, -1)
