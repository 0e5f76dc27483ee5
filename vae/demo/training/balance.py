"""Brings the activations of a trained VAE to about one without changing what it computes.

Every layer reads the stream of a network through a norm, or copies it linearly into a wider or a
smaller one. So a factor on the stream is free: whoever writes to the stream is scaled with it. In
training nothing holds that factor; it grew beyond what float16 can hold.
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .network import Attention, Downsample, ResidualBlock, TrainingVAE, Upsample


@torch.no_grad()
def balanced(vae: TrainingVAE, frames: Tensor) -> TrainingVAE:
    """Copy a VAE, with streams of root mean square one.

    Args:
        vae: The VAE.
        frames: `[B, 3, T, H, W]` in [-1, 1], clips like those that it was trained on.

    Returns:
        A VAE with the same outputs, rounding aside.
    """
    vae = copy.deepcopy(vae)
    encoder, decoder = vae.encoder, vae.decoder
    latent = vae.encode(frames)
    _balance([encoder.conv1, *encoder.downsamples, *encoder.middle], frames)
    _balance([decoder.conv1, *decoder.middle, *decoder.upsamples], vae.conv2(latent))
    return vae


def _balance(layers: Iterable[nn.Module], x: Tensor) -> None:
    """Scale the layers of a network, from its first convolution to its head.

    Args:
        layers: In the order of the graph.
        x: What the first of them is given; followed through the layers as they are before scaling.
    """
    factor = 1.0
    for layer in layers:
        x = layer(x)
        before, here = factor, 1.0 / x.square().mean().sqrt().item()
        if isinstance(layer, ResidualBlock):
            if not isinstance(layer.shortcut, nn.Identity):
                _scale(layer.shortcut, here / before, here)
                factor = here
            _scale(layer.residual["6"], factor, factor)
        elif isinstance(layer, Attention):
            _scale(layer.proj, factor, factor)
        elif isinstance(layer, (Downsample, Upsample)):
            # `time_conv` passes the first frame by, so it cannot have a factor of its own.
            _scale(layer.resample[1], here / before, here)
            factor = here
            if layer.time_conv is not None:
                _scale(layer.time_conv, 1.0, here if isinstance(layer, Downsample) else before)
        else:
            _scale(layer, here, here)
            factor = here


def _scale(conv: nn.Module, weight: float, bias: float) -> None:
    """Multiply a convolution's weight and bias."""
    parameters = dict(conv.named_parameters())
    parameters["weight"].mul_(weight)
    parameters["bias"].mul_(bias)
