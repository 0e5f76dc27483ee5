"""The part of every frame that one rank computes: some rows, or some columns.

A layer with a 3x3 kernel needs one line of each neighbour, which is exchanged before the layer
runs. Only lines of new frames are exchanged: a convolution over time keeps earlier frames together
with the lines that came with them. Beyond the edge of the picture there are zeros.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import lacks, new_video
from ..layers.lines import Attempt, Lines
from ..models.receptive_field import Size
from ..planning.parts import AXES, divide, largest_part, most_lines
from .ranks import Ranks, Swap, at_once


@dataclass(frozen=True)
class Shard:
    """The part of one rank.

    Attributes:
        ranks: The ranks.
        dim: The divided dimension of `[B, C, T, H, W]`: 3 or 4.
        edges: Where the parts start and end, in lines of a latent; one more than ranks.
    """

    ranks: Ranks
    dim: int
    edges: tuple[int, ...]

    @property
    def lines(self) -> int:
        """Lines of a latent that this rank has."""
        return self.edges[self.ranks.rank + 1] - self.edges[self.ranks.rank]

    def largest(self, count: int) -> int:
        """Return `count`, which grows with the lines of this rank, for `largest_part`."""
        return -(-count * most_lines(self.edges) // self.lines)

    def largest_part(self, size: Size) -> Size:
        """Return height and width of the largest part of latents of `size`, with its halo."""
        return largest_part(size, self.dim, self.edges)

    def place(self, lines: int) -> tuple[int, int]:
        """Return where `lines` lines of this rank start in whole frames, and the lines of those."""
        scale = lines // self.lines
        return scale * self.edges[self.ranks.rank], scale * self.edges[-1]

    def cut(self, whole: Tensor) -> Tensor:
        """Return the part of this rank, a view, of `whole` frames `[B, C, T, H, W]` of any size."""
        scale = whole.shape[self.dim] // self.edges[-1]
        return whole.narrow(self.dim, scale * self.edges[self.ranks.rank], scale * self.lines)

    def exchange(
        self, first: Tensor | None, last: Tensor | None, attempt: Attempt = at_once
    ) -> Lines:
        """Exchange lines with the neighbours.

        Args:
            first: The first lines of this rank, for the neighbour before it, `[B, C, T, n, W]` or
                `[B, C, T, H, n]`. None: it needs none.
            last: The last lines, for the neighbour after it, or None.
            attempt: Runs an allocation, such as `Relief.attempt`.

        Returns:
            The last lines of the neighbour before, if `last` is given, and the first lines of the
            neighbour after, if `first` is.
        """
        rank = self.ranks.rank
        ends = [None if x is None else attempt(functools.partial(_dense, x)) for x in (first, last)]
        got: list[Tensor | None] = [None, None]
        parts: dict[int, Swap] = {}
        for side, peer in enumerate((rank - 1, rank + 1)):
            sent, like = ends[side], ends[1 - side]
            if 0 <= peer < self.ranks.size:
                if like is not None:
                    got[side] = attempt(functools.partial(torch.empty_like, like))
                parts[peer] = sent, got[side]
        self.ranks.swap(parts, attempt)
        return Lines(*(None if lines is None else lines.movedim(-1, 1) for lines in got))

    def gather(self, x: Tensor, attempt: Attempt = at_once) -> Tensor:
        """Return whole frames.

        Args:
            x: `[B, C, T, H, W]`, the part of this rank.
            attempt: Runs an allocation, such as `Relief.attempt`.

        Returns:
            `[B, C, T, H, W]`, channels-last, on every rank.
        """
        scale = x.shape[self.dim] // self.lines
        sizes = [scale * (stop - start) for start, stop in itertools.pairwise(self.edges)]
        # The divided dimension first, channels last.
        block = attempt(x.movedim((self.dim, 1), (0, -1)).contiguous)
        parts = self.ranks.gather(block, sizes, attempt)
        shape = list(x.shape)
        shape[self.dim] = sum(sizes)
        whole = attempt(lambda: new_video(x, tuple(shape)))
        at = 0
        for part, size in zip(parts, sizes, strict=True):
            whole.narrow(self.dim, at, size).copy_(part.movedim((0, -1), (self.dim, 1)))
            at += size
        return whole

    def statistics(self, own: Tensor, attempt: Attempt = at_once, eps: float = 1e-6) -> Tensor:
        """Return the statistics of whole frames, as `group_norm_statistics` does.

        Sums of values and of squares, of which each rank has its share, in float64.

        Args:
            own: `[B, T, 2, groups]`: mean and `1 / sqrt(var + eps)` of the part of this rank.
            attempt: Runs an allocation, such as `Relief.attempt`.
            eps: As for the norm.

        Returns:
            `[B, T, 2, groups]`.
        """
        wide = torch.float32 if lacks(own.device, torch.float64) else torch.float64
        share = self.lines / self.edges[-1]

        def moments() -> Tensor:
            mean, inverse = own.to(wide).unbind(2)
            square = inverse.square().reciprocal() - eps + mean.square()
            return torch.stack([mean, square], dim=2) * share

        total = self.ranks.sum(attempt(moments), attempt)

        def combined() -> Tensor:
            mean, square = total.unbind(2)
            variance = (square - mean.square()).clamp_min(0)
            return torch.stack([mean, (variance + eps).rsqrt()], dim=2).to(own.dtype)

        return attempt(combined)


class ShardGroup(Ranks):
    """The ranks that share videos, one after the other."""

    def split(self, height: int, width: int, attempt: Attempt = at_once) -> Shard:
        """Divide the frames of a video.

        Args:
            height: Rows of a latent.
            width: Columns of a latent.
            attempt: Runs an allocation, such as `Relief.attempt`.

        Returns:
            The part of this rank.

        Raises:
            ValueError: There are more ranks than rows or columns, or a rank has other frames or
                divides them along another axis.
        """
        axis = 0 if self.axis is None else AXES[self.axis]
        self.check_equal({"height": height, "width": width, "axis": axis}, attempt)
        return Shard(self, *divide((height, width), self.size, self.axis))


def _dense(lines: Tensor) -> Tensor:
    """Return `lines` `[B, C, T, H, W]` as a contiguous `[B, T, H, W, C]`."""
    return lines.movedim(1, -1).contiguous()
