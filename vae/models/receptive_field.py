"""What a layer sees: how far back in time and to each side, and how large its frames become."""

import math
from collections.abc import Sequence

from torch import nn

from ..layers.causal_conv import CausalConv3d
from ..layers.causal_layer import CausalLayer
from ..layers.conv import Conv
from .base import Network

Span = tuple[int, int]
Size = tuple[int, int]


def latents_before(decoder: Network) -> int:
    """Latents before its own that a frame depends on.

    Counted from the frames to the latents: each convolution adds the frames that it looks back, and
    a layer that doubles the frames halves what has come together.
    """
    frames = 0
    for layer in reversed(decoder.layers()):
        for part in reversed(layer.blocks):
            back = sum(taps - 1 for taps, _ in causal_taps(part))
            # A frame more, because the first of two does not begin where the latent does.
            frames = math.ceil(frames / part.times) + back + part.times - 1
    return frames


def causal_taps(layer: CausalLayer) -> list[tuple[int, int]]:
    """Taps and stride in time of the causal convolutions that a layer's frames go through."""
    return [
        (module.weight.shape[2], module.stride)
        for part in layer.blocks
        for module in part.modules()
        if isinstance(module, CausalConv3d)
    ]


def is_encoder(network: Network) -> bool:
    """Whether frames become smaller on the way."""
    return any(layer.scale < 1 for layer in network.layers())


def frame_sizes(layers: Sequence[CausalLayer], size: Size) -> list[Size]:
    """Height and width of whole frames before each layer, and after the last."""
    sizes = [size]
    for layer in layers:
        height, width = sizes[-1]
        sizes.append((int(height * layer.scale), int(width * layer.scale)))
    return sizes


def reach(part: nn.Module) -> int:
    """Pixels that a layer without `blocks` sees on each side of one, where its convolutions are."""
    convs = (module for module in part.modules() if isinstance(module, Conv))
    return sum(conv.weight.shape[-1] // 2 for conv in convs)
