"""What a candidate of the convolution does in its own pass."""

from typing import NamedTuple


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
