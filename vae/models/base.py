"""What the encoders and decoders of all layouts have in common: a chain of causal layers."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ..layers.causal_conv import CausalConv3d
from ..layers.temporal_cache import TemporalCache
from .wan_blocks import AttentionBlock, ResidualBlock, RMSNorm

Layer = Callable[[Tensor, TemporalCache], Tensor]


class Network(nn.Module):
    """An encoder or a decoder, which `stream.advance` calls layer by layer."""

    def layers(self) -> list[nn.Module]:
        """The layers in order, every one from `(x, cache)` to `x`."""
        raise NotImplementedError

    def chains(self) -> list[list[Layer]]:
        """The layers, cut before each that has `pairs`.

        Such a layer takes two frames at a time, so that those of a step come together before it.
        """
        chains: list[list[Layer]] = [[]]
        for layer in self.layers():
            if getattr(layer, "pairs", False):
                chains.append([])
            chains[-1].append(layer)
        return chains


class Head(nn.Module):
    """Norm, SiLU and the last convolution.

    Args:
        in_channels: Channels in.
        out_channels: Channels out.
        taps: Frames that the convolution sees.
    """

    def __init__(self, in_channels: int, out_channels: int, taps: int = 3) -> None:
        super().__init__()
        self.add_module("0", RMSNorm(in_channels))
        self.add_module("2", CausalConv3d(in_channels, out_channels, (taps, 3, 3)))

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """`[B, C_in, T, H, W]` to `[B, C_out, T, H, W]`."""
        norm, conv = self.children()
        return conv(x, cache, fill=norm.silu)


def middle(channels: int, taps: int = 3) -> nn.ModuleList:
    """Residual, attention, residual."""
    return nn.ModuleList(
        [
            ResidualBlock(channels, channels, taps),
            AttentionBlock(channels),
            ResidualBlock(channels, channels, taps),
        ]
    )


def sublayers(layer: Layer) -> Sequence[nn.Module]:
    """The layers that a layer is made of: its `blocks`, or itself; nothing for a plain function."""
    if not isinstance(layer, nn.Module):
        return []
    blocks = getattr(layer, "blocks", None)
    return [layer] if blocks is None else list(blocks)
