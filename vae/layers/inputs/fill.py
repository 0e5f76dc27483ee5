"""What writes the input of a convolution into its buffer: a norm, or a copy."""

from typing import Protocol

from torch import Tensor

from ....kernels import zero_of
from ..workspace import within


class Fill(Protocol):
    """An elementwise op or norm that writes its result into a given buffer."""

    def __call__(
        self, x: Tensor, *, out: Tensor, tail: Tensor | None = None, border: int = 0
    ) -> object:
        """Write the result for `x` into `out`, larger by `border` rows and columns of zeros a side.

        The frames of `tail` go in front of it; afterwards it holds the last frames of `out`.
        """


def copied(x: Tensor, *, out: Tensor, tail: Tensor | None = None, border: int = 0) -> None:
    """Copy frames, as a `Fill`."""
    inner = within(out, border)
    known = 0 if tail is None else tail.shape[2]
    if border:
        out.fill_(zero_of(out.dtype))
    inner[:, :, known:] = x
    if tail is not None:
        inner[:, :, :known] = tail
        tail.copy_(inner[:, :, inner.shape[2] - known :])
