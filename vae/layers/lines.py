"""What layers need of a shard: the lines of its neighbours, and sums over whole frames."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Lines(NamedTuple):
    """Lines of the neighbours, `[B, C, T, n, W]` or `[B, C, T, H, n]`; None: zeros."""

    before: Tensor | None
    after: Tensor | None

    def of(self, frames: slice) -> "Lines":
        """Return the lines of some `frames`."""
        return Lines(*(None if lines is None else lines[:, :, frames] for lines in self))


class FrameShard(Protocol):
    """A part of every frame, of which other ranks have the others; see `sharding.shard.Shard`."""

    @property
    def dim(self) -> int:
        """The divided dimension of `[B, C, T, H, W]`."""
        ...

    def largest(self, count: int) -> int:
        """Return `count`, which grows with the lines of this rank, for `largest_part`."""
        ...

    def largest_part(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the largest part of latents of `size`, with its halo."""
        ...

    def place(self, lines: int) -> tuple[int, int]:
        """Return where `lines` lines of this rank start in whole frames, and the lines of those."""
        ...

    def cut(self, whole: Tensor) -> Tensor:
        """Return the part of this rank of `whole` frames `[B, C, T, H, W]`."""
        ...

    def exchange(self, first: Tensor | None, last: Tensor | None) -> Lines:
        """Exchange `first` and `last` lines `[B, C, T, H, W]`; None: not in this direction."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return whole frames of parts `x` `[B, C, T, H, W]`."""
        ...

    def statistics(self, own: Tensor) -> Tensor:
        """Return those of whole frames for `own` `[B, T, 2, groups]`."""
        ...
