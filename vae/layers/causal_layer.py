"""A layer of a network: what it makes of a run of frames, and what a planner reads off it."""

from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor, nn

from .temporal_cache import TemporalCache


class CausalLayer(nn.Module):
    """A layer that sees a run of frames and, through the cache of the video, those before it.

    Attributes:
        scale: Height and width out for those in.
        times: Frames out for one in, but for the first of a video.
        growth: How many times as large as its input an activation inside is, at least 1.
        pairs: It takes two frames at a time.
        sees_all: It sees every pixel of a frame, so that it cannot run in tiles.
        settles: It heeds `cache.settling`.
        holds: What it keeps meanwhile beside what its blocks make: "input", "result" or nothing.
        repeats: It may be given the last frame again, see `wants`; its parts may differ in length.
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
        """The layers that it is made of; itself where it is not made of others."""
        return (self,)

    def wants(self, frames: int) -> int:
        """Frames that it is to be given, where so many have come."""
        return frames

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """`[B, C, T, H, W]` to `[B, C_out, T_out, H_out, W_out]`, both channels-last."""
        raise NotImplementedError
