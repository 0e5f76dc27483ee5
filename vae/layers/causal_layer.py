"""The interface of a layer: its forward pass on a run of frames, and properties for planning."""

from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor, nn

from .temporal_cache import TemporalCache


class CausalLayer(nn.Module):
    """A layer that sees a run of frames and, through the cache of the video, the frames before it.

    Attributes:
        scale: Ratio of output to input height and width.
        times: Output frames per input frame, except for the first frame of a video.
        growth: Size of the largest inner activation over the size of the input, at least 1.
        pairs: The layer takes two frames at a time.
        sees_all: The layer sees every pixel of a frame, so it cannot run in tiles.
        settles: The layer supports `cache.settling`.
        holds: What it holds while its blocks run: "input", "result" or "" for nothing.
        repeats: The layer can get copies of the last frame, see `wants`; its parts may differ in
            length.
    """

    scale: Fraction = Fraction(1)
    times: int = 1
    growth: int = 1
    pairs: bool = False
    sees_all: bool = False
    settles: bool = False
    holds: str = ""
    repeats: bool = False

    @property
    def blocks(self) -> Sequence["CausalLayer"]:
        """The layers inside; the layer itself if it has none."""
        return (self,)

    def wants(self, frames: int) -> int:
        """Return how many frames the layer needs when `frames` have arrived."""
        return frames

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the layer.

        Args:
            x: `[B, C, T, H, W]`, channels-last.
            cache: State of the video.

        Returns:
            `[B, C_out, T_out, H_out, W_out]`, channels-last.

        Raises:
            NotImplementedError: In this base class.
        """
        raise NotImplementedError
