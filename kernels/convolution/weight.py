"""The weight of a convolution, and the layouts that candidates derive from it."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..shapes import channels_last_order


class WeightForm(NamedTuple):
    """The form of a parameter in which a call reads it."""

    kind: str
    dtype: torch.dtype
    phase: int = 0  # of a form for one of several phases
    place: str = ""  # of the call in a video, where the form depends on it


class ConvWeight:
    """A weight that `derive` returns when it is first used, in the layouts that were asked for."""

    # `derive` returns channels-last memory; it is called again where `keeps` is False. The caller
    # drops the weight when the parameters that it is derived from change.

    requires_grad = False

    def __init__(
        self,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        derive: Callable[[], Tensor],
        *,
        keeps: bool = True,
    ) -> None:
        self.shape, self.dtype, self.device, self.keeps = tuple(shape), dtype, device, keeps
        # Taps in frames, rows and columns.
        self.kernel = (1, *self.shape[2:])[-3:]
        self._derive = derive
        self._layouts: dict[Hashable, Tensor] = {}

    @classmethod
    def of(cls, weight: "Tensor | ConvWeight") -> "ConvWeight":
        """Return a `ConvWeight` itself, or wrap a tensor for one call."""
        if isinstance(weight, ConvWeight):
            return weight
        kind = weight.shape, weight.dtype, weight.device
        wrapped = cls(*kind, lambda: channels_last(weight), keeps=False)
        wrapped.requires_grad = weight.requires_grad
        return wrapped

    @property
    def ndim(self) -> int:
        """Number of dimensions, 4 or 5."""
        return len(self.shape)

    @property
    def layouts(self) -> tuple[Tensor, ...]:
        """The kept tensors, in any layout `[...]`."""
        return tuple(self._layouts.values())

    def plain(self) -> Tensor:
        """Return the weight `[C_out, C_in, ...]` in channels-last memory."""
        return self.laid_out("plain", lambda weight: weight)

    def laid_out(self, layout: Hashable, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the weight in a layout that `arrange` makes of the plain one, kept by its name."""
        kept = self._layouts.get(layout)
        if kept is None:
            # Outside inference mode, so that the weight can be used in both modes.
            with torch.inference_mode(False), torch.no_grad():
                plain = self._layouts.get("plain")
                kept = arrange(self._derive() if plain is None else plain)
            if self.keeps:
                self._layouts[layout] = kept
        return kept


def channels_last(x: Tensor) -> Tensor:
    """Return `x` `[N, C, ...]` in channels-last memory; itself if it is there."""
    return x.contiguous(memory_format=channels_last_order(x.ndim))
