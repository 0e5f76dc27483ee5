"""How far back in time what leaves a decoder depends on what enters it."""

import math

from ..layers.causal_conv import CausalConv3d
from .base import Network, sublayers


def latents_before(decoder: Network) -> int:
    """Latents before its own that a frame depends on.

    Counted from the frames to the latents: each convolution adds the frames that it looks back, and
    a layer that doubles the frames halves what has come together.
    """
    frames = 0
    for layer in reversed(decoder.layers()):
        for part in reversed(sublayers(layer)):
            back = sum(
                module.weight.shape[2] - 1
                for module in part.modules()
                if isinstance(module, CausalConv3d)
            )
            # A frame more, because the first of two does not begin where the latent does.
            frames = math.ceil(frames / getattr(part, "times", 1)) + back
            frames += getattr(part, "times", 1) - 1
    return frames
