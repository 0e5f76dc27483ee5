"""The int8 convolutions of one video: which ones, and how many codes were out of range.

A convolution that follows a norm and SiLU can read their result as 8-bit codes (`kernels/codes.py`)
and multiply them with int8 weights. Its input buffer and its tail have half of the bytes. The steps
of the codes follow from the scales of the norm, so they are multiplied into the weights, and no
activation is measured. The video counts the values that codes cannot hold.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from ....kernels import code_dtype

# Share of the codes that may be out of range. Four deviations leave 0.003 % of normal values out.
_MOST_SATURATED = 1e-3


class Fill(Protocol):
    """An elementwise op or norm that writes its result into a given buffer."""

    def __call__(
        self, x: Tensor, *, out: Tensor, tail: Tensor | None = None, border: int = 0
    ) -> object:
        """Write the result for `x` into `out`, larger by `border` rows and columns of zeros a side.

        The frames of `tail` go in front of it; afterwards it holds the last frames of `out`.
        """


class Norm(Protocol):
    """The norm before a convolution that can read codes."""

    def steps(self) -> Tensor:
        """Return the step between two codes of each channel, `[C]` in float32."""
        ...

    def scales(self) -> tuple[Tensor, ...]:
        """Return the parameters `[C]` that the steps are derived from."""
        ...


class Coding:
    """The convolutions of a video that read codes."""

    def __init__(self, names: frozenset[str], device: torch.device) -> None:
        self.names, self.dtype = names, code_dtype(device)
        # Layers write to it outside inference mode.
        with torch.inference_mode(False):
            self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._written = 0

    def filling(self, write: Callable[..., object], codes: Tensor) -> Fill:
        """Return a `Fill` that writes codes and counts them."""

        def fill(x: Tensor, *, out: Tensor, tail: Tensor | None = None, border: int = 0) -> object:
            self._written += x.numel()
            options = {"codes": codes, "saturated": self._counts}
            return write(x, out=out, tail=tail, border=border, **options)

        return fill

    def verdict(self) -> Tensor:
        """Return `[]`, float32, for the codes since the last call: 0, or infinity if wrong."""
        saturated, missing = self._counts
        bad = (saturated > _MOST_SATURATED * self._written) | (missing > 0)
        verdict = torch.where(bad, torch.inf, 0.0)
        with torch.inference_mode(False):
            self._counts = torch.zeros_like(self._counts)
        self._written = 0
        return verdict


def name_convolutions(network: nn.Module) -> list[str]:
    """Give each convolution that can read codes its name in the network, and return the names."""
    names = []
    for name, module in network.named_modules():
        if getattr(module, "norm_before", None) is not None:
            module.code_name = name  # type: ignore[assignment]
            names.append(name)
    return names
