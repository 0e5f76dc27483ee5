"""The part of every frame that one rank computes: some rows, or some columns.

A layer with a 3x3 kernel needs one line of each neighbour, which is exchanged before the layer
runs. Only lines of new frames are exchanged: a convolution over time keeps earlier frames together
with the lines that came with them. Beyond the edge of the picture there are zeros.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import lacks, new_video
from ..layers.lines import Lines
from ..models.receptive_field import Size
from ..planning.job import StreamJob
from ..planning.parts import AXES, divide, largest_part, most_lines
from ..planning.plan import Plan, usual_limit
from .ranks import Ranks, Swap


@dataclass(frozen=True)
class Shard:
    """The part of one rank."""

    ranks: Ranks
    dim: int  # of `[B, C, T, H, W]` that is divided: 3 or 4
    edges: tuple[int, ...]  # where parts start and end, in lines of a latent; one more than ranks

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

    def exchange(self, first: Tensor | None, last: Tensor | None) -> Lines:
        """Send `first` and `last` lines to the neighbours before and after, and return theirs."""
        # `[B, C, T, n, W]` or `[B, C, T, H, n]`. Lines before are received if `last` is given, and
        # as many; lines after if `first` is.
        rank = self.ranks.rank
        # Contiguous `[B, T, H, W, C]`.
        ends = [None if x is None else x.movedim(1, -1).contiguous() for x in (first, last)]
        got: list[Tensor | None] = [None, None]
        parts: dict[int, Swap] = {}
        for side, peer in enumerate((rank - 1, rank + 1)):
            sent, like = ends[side], ends[1 - side]
            if 0 <= peer < self.ranks.size:
                if like is not None:
                    got[side] = torch.empty_like(like)
                parts[peer] = sent, got[side]
        self.ranks.swap(parts)
        return Lines(*(None if lines is None else lines.movedim(-1, 1) for lines in got))

    def gather(self, x: Tensor) -> Tensor:
        """Return whole frames `[B, C, T, H, W]`, channels-last, of the parts `x` of all ranks."""
        scale = x.shape[self.dim] // self.lines
        sizes = [scale * (stop - start) for start, stop in itertools.pairwise(self.edges)]
        # The divided dimension first, channels last.
        parts = self.ranks.gather(x.movedim((self.dim, 1), (0, -1)).contiguous(), sizes)
        shape = list(x.shape)
        shape[self.dim] = sum(sizes)
        whole = new_video(x, tuple(shape))
        at = 0
        for part, size in zip(parts, sizes, strict=True):
            whole.narrow(self.dim, at, size).copy_(part.movedim((0, -1), (self.dim, 1)))
            at += size
        return whole

    def statistics(self, own: Tensor, eps: float = 1e-6) -> Tensor:
        """Return `group_norm_statistics` of whole frames from `own` `[B, T, 2, groups]`."""
        # Sums of values and of squares, of which each rank has its share, in float64.
        wide = torch.float32 if lacks(own.device, torch.float64) else torch.float64
        mean, inverse = own.to(wide).unbind(2)
        square = inverse.square().reciprocal() - eps + mean.square()
        share = torch.stack([mean, square], dim=2) * (self.lines / self.edges[-1])
        mean, square = self.ranks.sum(share).unbind(2)
        variance = (square - mean.square()).clamp_min(0)
        return torch.stack([mean, (variance + eps).rsqrt()], dim=2).to(own.dtype)


class ShardGroup(Ranks):
    """The ranks that share videos, one after the other."""

    def split(self, height: int, width: int) -> Shard:
        """Return the part of this rank, or raise a `ValueError` if ranks have other frames."""
        axis = 0 if self.axis is None else AXES[self.axis]
        self.check_equal({"height": height, "width": width, "axis": axis})
        return Shard(self, *divide((height, width), self.size, self.axis))

    def limit_of(self, job: StreamJob, limit_bytes: int | None) -> int:
        """Return the memory limit of the rank that has least; ranks on one device divide it."""
        if limit_bytes is None:
            limit_bytes = usual_limit(job) // self.sharers
        return -self.most("limit_bytes", -limit_bytes)

    def check_plan(self, job: StreamJob, plan: Plan, options: Mapping[str, bool]) -> None:
        """Raise a `ValueError` if a rank has another plan, batch or `options`."""
        kind = {"encode": job.spec.encodes, "single_frame": job.single_frame, **options}
        plans = {"chunk": plan.chunk, "part_bytes": plan.part_bytes, "peak_bytes": plan.peak_bytes}
        self.check_equal({"batch": job.latent_size[0], **kind, **plans})
