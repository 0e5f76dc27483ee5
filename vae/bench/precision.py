"""What int8 costs: decodes in bfloat16 and with int8 against one in float32."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from ..model import VideoVAE
from ..streaming.int8.layers import Int8Layers, probe
from ..streaming.int8.settings import AUTO, INT8
from ..streaming.options import AUTOMATIC, StreamOptions
from ..streaming.precision import compute_dtype
from .content import Clip
from .measure import psnr
from .report import PrecisionReport, dtype_label

# Size of the clip without a given latent: pixels, and latents: the first, and two with a past.
_WIDTH, _HEIGHT, _LATENTS = 384, 160, 3


def int8_layers(vae: VideoVAE, options: StreamOptions = AUTOMATIC) -> Int8Layers:
    """Return the convolutions that run in int8, also within inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return vae.int8_layers(vae.int8_dtype(options))


def compare_precision(
    vae: VideoVAE, latent: Tensor | None = None, options: StreamOptions = AUTOMATIC
) -> PrecisionReport:
    """Decode a latent in float32, in bfloat16 and with int8, on the same weights.

    The VAE is not modified. Without a latent it is a smooth one with the statistics of the VAE.
    """
    layers = int8_layers(vae, options)
    if latent is None:
        config = vae.config
        height, width = (side // config.spatial_compression for side in (_HEIGHT, _WIDTH))
        frames = 1 if config.is_of_pictures else _LATENTS
        drawn = probe(config.latent_channels, max(height, width), frames=frames)
        latent = vae.denormalize(drawn[..., :height, :width])
    exact = _images(vae, AUTO, latent, replace(options, dtype=torch.float32))
    narrow = _images(vae, AUTO, latent, replace(options, dtype=torch.bfloat16))
    mixed = _images(vae, INT8, latent, options)
    batch, frames, height, width = exact.shape[:4]
    clip, other = Clip(width, height, batch * frames), dtype_label(vae.int8_dtype(options))
    computed = compute_dtype(torch.bfloat16, vae.device)
    bf16 = "bf16" if computed == torch.bfloat16 else "bf16 in fp32"
    return PrecisionReport(clip, other, bf16, psnr(narrow, exact), psnr(mixed, exact), layers)


def _images(vae: VideoVAE, precision: str, latent: Tensor, options: StreamOptions) -> Tensor:
    """Decode `latent` to images `[B, T, H, W, C]`, float32 in [0, 1] on the CPU."""
    twin = copy.copy(vae)  # which shares all tensors and layers
    twin.precision = precision
    pieces = [piece.cpu().float() for piece in twin.decode_stream(latent, options)]
    return torch.cat(pieces, dim=2).clamp(-1, 1).add(1).div(2).movedim(1, -1)
