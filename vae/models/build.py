"""Which encoder and decoder a configuration asks for."""

from . import seedvr2, wan22
from . import wan21 as wan
from .base import Network
from .config import SEEDVR2, WAN21, VAEConfig


def make_encoder(config: VAEConfig) -> Network | None:
    """The encoder, with weights that are not set; None where the checkpoint has none."""
    if config.encoder_widths is None:
        return None
    channels = config.image_channels * config.patch_size**2
    if config.family == WAN21:
        return wan.Encoder(config.encoder_widths, channels, config.latent_channels)
    if config.family == SEEDVR2:
        return seedvr2.Encoder(config.encoder_widths, channels, config.latent_channels)
    return wan22.Encoder(config.encoder_widths, channels, config.latent_channels, config.taps)


def make_decoder(config: VAEConfig) -> Network:
    """The decoder, with weights that are not set."""
    channels = config.image_channels * (config.output_scale * config.patch_size) ** 2
    if config.family == WAN21:
        return wan.Decoder(config.decoder_widths, channels, config.latent_channels)
    if config.family == SEEDVR2:
        return seedvr2.Decoder(config.decoder_widths, channels, config.latent_channels)
    return wan22.Decoder(config.decoder_widths, channels, config.latent_channels, config.taps)
