"""The interface of a layer: its forward pass on a run of frames, and properties for planning."""

from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor, nn

from .temporal_cache import TemporalCache


class CausalLayer(nn.Module):
    """A layer that sees a run of frames and, through the cache, the frames before it."""

    scale: Fraction = Fraction(1)  # Ratio of output to input height and width
    times: int = 1  # Output frames per input frame, except for the first frame of a video
    growth: int = 1  # Size of the largest inner activation over the size of the input, at least 1
    pairs: bool = False  # The layer takes two frames at a time
    sees_all: bool = False  # The layer sees every pixel of a frame, so it cannot run in tiles
    settles: bool = False  # The layer supports `cache.settling`
    repeats: bool = False  # It can get copies of the last frame; its parts may differ in length

    @property
    def blocks(self) -> Sequence["CausalLayer"]:
        """The layers inside; the layer itself if it has none."""
        return (self,)

    def wants(self, frames: int) -> int:
        """Return how many frames the layer needs when `frames` have arrived."""
        return frames

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the layer on `[B, C, T, H, W]`, channels-last; it may write into its input."""
        raise NotImplementedError
