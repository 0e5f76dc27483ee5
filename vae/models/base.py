"""Base of the encoders and decoders of all families: a chain of causal layers."""

from typing import cast

import torch
from torch import nn

from ...kernels import Snapshot, route_conditions
from ..layers.causal_layer import CausalLayer
from ..layers.conv import Kept


class Network(nn.Module):
    """An encoder or a decoder, whose layers a stream calls one by one.

    Constructors take the widths (channels after the first convolution and of each stage in order),
    the channels of the frames, the channels of a latent (an encoder outputs twice as many, mean and
    log-variance), and in the Wan layouts the temporal taps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def route_token(self, seen: Snapshot, device: torch.device) -> object:
        """Return what stands for the conditions of routes in videos on `device` that see `seen`."""
        return self.kept.of(("routes", device, route_conditions(seen)), object)

    def layers(self) -> list[CausalLayer]:
        """Return the layers in order."""
        return in_order(*self.children())

    def chains(self) -> list[list[CausalLayer]]:
        """Return the layers, cut where frames are joined: before each one that has `pairs`."""
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


def unwrapped(network: Network) -> Network:
    """Return `network` without the module that `torch.compile` puts around it."""
    return getattr(network, "_orig_mod", network)
