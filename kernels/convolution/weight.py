"""The weight of a convolution, and the layouts that candidates derive from it."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..shapes import channels_last_order


class ConvWeight:
    """A weight that is derived when it is first used, and kept in the layouts that were asked for.

    The caller drops it when the parameters that it is derived from change.

    Args:
        shape: `[C_out, C_in, kh, kw]` or `[C_out, C_in, kt, kh, kw]`.
        dtype: Dtype of the weight.
        device: Device of the weight.
        derive: Returns the weight in channels-last memory; called again where it is not kept.
        keeps: Keep the layouts; otherwise each call derives what it needs.

    Attributes:
        requires_grad: It wraps a tensor that requires a gradient.
    """

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
        self._derive = derive
        self._layouts: dict[Hashable, Tensor] = {}

    @classmethod
    def of(cls, weight: "Tensor | ConvWeight") -> "ConvWeight":
        """Return a `ConvWeight` itself, or wrap a tensor for one call.

        Args:
            weight: `[C_out, C_in, ...]`.

        Returns:
            The weight.
        """
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
        """Return the weight in a layout.

        Args:
            layout: Name of the layout; equal names have equal results.
            arrange: Converts the plain weight `[C_out, C_in, ...]`.

        Returns:
            The weight `[...]` in this layout.
        """
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
    """Return a tensor in channels-last memory; itself if it is there.

    Args:
        x: A weight, frames or a video, `[N, C, ...]`.

    Returns:
        `[N, C, ...]`.
    """
    return x.contiguous(memory_format=channels_last_order(x.ndim))
