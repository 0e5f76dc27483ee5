"""What the encoders and decoders of all families have in common: a chain of causal layers."""

from typing import cast

from torch import nn

from ..layers.causal_layer import CausalLayer


class Network(nn.Module):
    """An encoder or a decoder, whose layers a stream calls one by one.

    Each is made for widths, the channels after its first convolution and of its stages in order;
    the channels of the frames that come in or go out; those of a latent, of which an encoder gives
    twice as many, mean and log-variance; and in the Wan 2.2 layout the taps.
    """

    def layers(self) -> list[CausalLayer]:
        """The layers in order, every one from `(x, cache)` to `x`: what it is made of."""
        return in_order(*self.children())

    def chains(self) -> list[list[CausalLayer]]:
        """The layers, cut before each that has `pairs`.

        Such a layer takes two frames at a time, so that those of a step come together before it.
        """
        chains: list[list[CausalLayer]] = [[]]
        for layer in self.layers():
            if layer.pairs:
                chains.append([])
            chains[-1].append(layer)
        return chains


def in_order(*parts: nn.Module) -> list[CausalLayer]:
    """The layers of a network: layers, and lists of layers."""
    layers = [
        layer for part in parts for layer in (part if isinstance(part, nn.ModuleList) else (part,))
    ]
    return cast(list[CausalLayer], layers)
