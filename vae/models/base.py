"""Base of the encoders and decoders of all families: a chain of causal layers."""

from typing import cast

from torch import nn

from ..layers.causal_layer import CausalLayer


class Network(nn.Module):
    """An encoder or a decoder, whose layers a stream calls one by one.

    Constructors take the widths (channels after the first convolution and of each stage in order),
    the channels of the frames, the channels of a latent (an encoder outputs twice as many, mean and
    log-variance), and in the Wan 2.2 layout the temporal taps.
    """

    def layers(self) -> list[CausalLayer]:
        """Return the layers in order."""
        return in_order(*self.children())

    def chains(self) -> list[list[CausalLayer]]:
        """Return the layers, cut before each one that has `pairs`.

        These layers take two frames at a time, so the frames of a step are joined before them.

        Returns:
            Lists of layers.
        """
        chains: list[list[CausalLayer]] = [[]]
        for layer in self.layers():
            if layer.pairs:
                chains.append([])
            chains[-1].append(layer)
        return chains


def in_order(*parts: nn.Module) -> list[CausalLayer]:
    """Return the layers of `parts`, which are layers and lists of layers."""
    layers = [
        layer for part in parts for layer in (part if isinstance(part, nn.ModuleList) else (part,))
    ]
    return cast(list[CausalLayer], layers)
