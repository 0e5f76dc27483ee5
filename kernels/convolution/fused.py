"""What a candidate of the convolution does in its own pass."""

from typing import NamedTuple


class Fused(NamedTuple):
    """What the convolution that runs some calls does without another pass.

    Attributes:
        tail: It reads the tail where it is. Otherwise it copies tail and new frames into one block,
            so the caller should write them there in the first place, and pass no tail.
        sums: It adds bias and residual, and writes into `out`.
        norm: It writes norm and SiLU of the result for a `gamma`; then it has `sums` too.
        bias: It adds a bias, even without `sums`. Otherwise a bias costs a pass, which the caller
            can save if the next op adds one too.
    """

    tail: bool = False
    sums: bool = False
    norm: bool = False
    bias: bool = False

    @property
    def adds_bias(self) -> bool:
        """Whether a bias costs nothing."""
        return self.bias or self.sums
