"""Base of the encoders and decoders of all families: a chain of causal layers."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from torch import nn

from ..layers.causal_layer import CausalLayer

# Results that a network keeps: sizes of frames come and go, and each has some 100 kB.
_MOST_KEPT = 64

_Result = TypeVar("_Result")


class Kept(dict[Hashable, Any]):
    """Results that follow from the layers of a network; a copied or pickled one starts without."""

    def __deepcopy__(self, memo: object) -> "Kept":
        return Kept()

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()

    def of(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """Return the result for `key`, from `make` the first time; it must not hold the network."""
        result = self.get(key)
        if result is None:
            for oldest in list(self)[: len(self) - _MOST_KEPT + 1]:
                self.pop(oldest, None)
            result = self[key] = make()
        return result


class Network(nn.Module):
    """An encoder or a decoder, whose layers a stream calls one by one.

    Constructors take the widths (channels after the first convolution and of each stage in order),
    the channels of the frames, the channels of a latent (an encoder outputs twice as many, mean and
    log-variance), and in the Wan layouts the temporal taps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def layers(self) -> list[CausalLayer]:
        """Return the layers in order."""
        return in_order(*self.children())

    def chains(self) -> list[list[CausalLayer]]:
        """Return the layers, cut before each one that has `pairs`.

        These layers take two frames at a time, so the frames of a step are joined before them.
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


def unwrapped(network: Network) -> Network:
    """Return `network` without the module that `torch.compile` puts around it."""
    return getattr(network, "_orig_mod", network)
