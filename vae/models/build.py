"""Construct the encoder and decoder of a configuration."""

from .base import Network
from .config import SEEDVR2, WAN21, VAEConfig
from .seedvr2 import SeedVR2Decoder, SeedVR2Encoder
from .wan21 import Wan21Decoder, Wan21Encoder
from .wan22 import Wan22Decoder, Wan22Encoder


def make_encoder(config: VAEConfig) -> Network | None:
    """Return the encoder of `config` with uninitialised weights; None: the checkpoint has none."""
    if config.encoder_widths is None:
        return None
    channels = config.image_channels * config.patch_size**2
    given = config.encoder_widths, channels, config.latent_channels
    if config.family == SEEDVR2:
        return SeedVR2Encoder(*given)
    return (Wan21Encoder if config.family == WAN21 else Wan22Encoder)(*given, config.taps)


def make_decoder(config: VAEConfig) -> Network:
    """Return the decoder of `config` with uninitialised weights."""
    channels = config.image_channels * (config.output_scale * config.patch_size) ** 2
    given = config.decoder_widths, channels, config.latent_channels
    if config.family == SEEDVR2:
        return SeedVR2Decoder(*given)
    return (Wan21Decoder if config.family == WAN21 else Wan22Decoder)(*given, config.taps)
