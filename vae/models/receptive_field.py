"""The receptive field of a layer in time and space, and the size of its frames."""

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
    """Return the number of earlier latents that a frame of `decoder` depends on."""

    # From the frames back to the latents: a layer that doubles the frames halves the sum, and each
    # convolution adds its context. None does so behind the doubling of its layer.
    def counted() -> int:
        frames = 0
        for layer in reversed(decoder.layers()):
            for part in reversed(layer.blocks):
                contexts = [each.context for each in part.modules() if isinstance(each, Conv)]
                frames = math.ceil(frames / part.times) + sum(contexts)
        return frames

    return decoder.kept.of("latents before", counted)


def frames_before(layers: Sequence[CausalLayer]) -> int:
    """Return the number of input frames, in whole merges, that a run's results depend on."""
    frames, merged = 0, 1
    for layer in reversed(layers):
        for taps, stride in reversed(causal_taps(layer)):
            frames, merged = frames * stride + taps - stride, merged * stride
    return math.ceil(frames / merged) * merged


def causal_taps(layer: CausalLayer) -> list[tuple[int, int]]:
    """Return temporal taps and stride of the causal convolutions of `layer`, in order."""
    return [
        (module.weight.shape[2], module.stride)
        for part in layer.blocks
        for module in part.modules()
        if isinstance(module, CausalConv3d)
    ]


def is_encoder(network: Network) -> bool:
    """Return whether `network` makes frames smaller."""
    return any(layer.scale < 1 for layer in network.layers())


def frame_sizes(layers: Sequence[CausalLayer], size: Size) -> list[Size]:
    """Return height and width of frames of `size` before each of `layers` and after the last."""
    sizes = [size]
    for layer in layers:
        height, width = sizes[-1]
        sizes.append((int(height * layer.scale), int(width * layer.scale)))
    return sizes


def reach(part: nn.Module) -> int:
    """Return the pixels that `part`, a layer without `blocks`, sees on each side of a pixel."""
    convs = (module for module in part.modules() if isinstance(module, Conv))
    return sum(conv.weight.shape[-1] // 2 for conv in convs)
