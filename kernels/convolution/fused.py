"""What a candidate of the convolutions does in its own pass."""

from typing import NamedTuple

from ..errors import Refusal

# Most channels of a tile of our kernels; more would spill registers.
WIDEST = 192


class Fused(NamedTuple):
    """What the convolution that runs some calls does without another pass."""

    # It reads the tail where it is. Otherwise it copies tail and new frames into one block, so the
    # caller should write them there in the first place, and pass no tail.
    tail: bool = False
    sums: bool = False  # It adds bias and residual, and writes into `out`.
    # It writes norm and SiLU of the result for a `gamma`; then it has `sums` too.
    norm: bool = False
    bias: bool = False  # It adds a bias, even without `sums`.

    @property
    def adds_bias(self) -> bool:
        """Whether a bias costs nothing."""
        return self.bias or self.sums


def of_ours(outputs: int) -> Fused:
    """Return what our kernels fuse: everything, the norm where a tile has all channels."""
    return Fused(tail=True, sums=True, bias=True, norm=outputs <= WIDEST)


def refuse_wide_norm(outputs: int, *, norm: bool) -> None:
    """Refuse a norm over more channels than a tile of our kernels has."""
    if norm and outputs > WIDEST:
        raise Refusal(f"a norm needs all channels in a tile: {WIDEST} at most, not {outputs}")
