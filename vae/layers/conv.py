"""Base of the convolutions: parameters, derived weights, and the call.

All memory is channels-last. The parameter holds the weight in the checkpoint's shape and under its
name. Other forms (the last temporal tap as a 2D weight, another dtype, oneDNN's blocked layout) are
derived from it once, and again when the parameter is replaced or written to.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import bias_residual
from . import cudnn
from .conv_weights import (
    ALIGNED,
    SPREAD,
    VECTOR,
    Form,
    Forms,
    aligns,
    checksum_of,
    derive,
    derived,
    keeps_form,
    output_size,
    own_bytes,
    packs,
    widened,
)
from .temporal_cache import TemporalCache


class Terms(NamedTuple):
    """Terms that a convolution adds to its products.

    Attributes:
        residual: Shape of the result; its memory may become the result. It is unchanged after an
            error.
        residual_bias: `[C_out]`, added together with `residual`.
        biased: Add the bias too. Otherwise the caller adds it, where `adds_bias_late` is true.
    """

    residual: Tensor | None = None
    residual_bias: Tensor | None = None
    biased: bool = True

    def of(self, change: Callable[[Tensor], Tensor]) -> "Terms":
        """Return a copy with `change(residual)`, if there is a residual `[B, C, T, H, W]`."""
        return self if self.residual is None else self._replace(residual=change(self.residual))


BIAS = Terms()


class Conv(nn.Module):
    """Parameters of a convolution and the forms derived from them.

    The kernel is `(height, width)` or `(time, height, width)`.

    Attributes:
        context: Earlier frames that it keeps in the cache.
        stride: Input frames per output frame.
        times: Output frames per input frame.
        first_form: Form of the weight for a first frame.
        forms: The derived weights.
    """

    context: int = 0
    stride: int = 1
    times: int = 1
    first_form: str = "volume"

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.forms = Forms()

    def form_bytes(self) -> int:
        """Return the bytes of the derived forms that do not share the parameter's memory."""
        return sum(own_bytes(form.weight, self.weight) for form in self.forms.values())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Conv":
        """Move or cast the parameters, and drop the forms derived from them.

        On a GPU the weight itself is stored in the layout of its convolution, so that it exists
        once. On the CPU it stays unchanged, because it can be shared with another module.
        """
        super()._apply(fn, recurse)
        weight = self.weight
        if weight.device.type not in ("cpu", "meta"):
            order = torch.channels_last if weight.ndim == 4 else torch.channels_last_3d
            with torch.inference_mode(False), torch.no_grad():
                weight.data = weight.data.contiguous(memory_format=order)
        self.forms.clear()
        return self

    def adds_bias_late(self, x: Tensor) -> bool:
        """Return whether the bias of `x` `[B, C, T, H, W]` should be added by the next pass.

        oneDNN adds the bias at no cost. On CUDA, PyTorch adds it in a separate pass after cuDNN,
        which is slow in channels-last memory.

        Args:
            x: The input.

        Returns:
            True if the bias would cost a pass.
        """
        return x.device.type != "cpu" and not _records(x, self.weight)

    def convolve(
        self,
        x: Tensor,
        kind: str,
        strides: tuple[int, ...],
        padding: tuple[int, int],
        cache: TemporalCache,
        terms: Terms = BIAS,
    ) -> Tensor:
        """Convolve frames or a video.

        Args:
            x: `[N, C_in, H, W]` or `[B, C_in, T, H, W]`, channels-last.
            kind: Form of the weight, one of the kinds of `derive`.
            strides: Stride of each dimension of the form.
            padding: Zero padding of height and of width, on both sides.
            cache: Provides memory, and frees some when it runs out.
            terms: Bias and residual to add.

        Returns:
            The result, channels-last.
        """
        pads = (0, *padding) if x.ndim == 5 else padding
        if _records(x, self.weight):
            return cache.attempt(functools.partial(self._recorded, x, kind, strides, pads, terms))
        if self._spreads(x, kind, terms.residual):
            steps = (*strides[:-1], SPREAD)
            return _gathered(self.convolve(x, f"{kind}, spread", steps, padding, cache))
        if terms.residual is None and aligns(x, self.weight, kind):
            kind += ALIGNED
        form = cache.attempt(functools.partial(self._form, kind, x, strides, pads))
        if form.packed:
            product = functools.partial(self._packed, x, kind, form, strides, pads, terms, cache)
        else:
            product = functools.partial(self._plain, x, kind, form, strides, pads, terms)
        return cache.attempt(product)

    def _recorded(
        self,
        x: Tensor,
        kind: str,
        strides: tuple[int, ...],
        pads: tuple[int, ...],
        terms: Terms,
    ) -> Tensor:
        """Convolve with differentiable operations."""
        convolve = F.conv2d if x.ndim == 4 else F.conv3d
        bias = self._bias(kind, self._offset(kind)).to(x.dtype)
        y = convolve(x, self._derive(kind, x.dtype), bias, stride=strides, padding=pads)
        y = y if terms.residual is None else y + terms.residual
        if terms.residual_bias is None:
            return y
        return y + terms.residual_bias.to(x.dtype).view(1, -1, *[1] * (x.ndim - 2))

    def _packed(
        self,
        x: Tensor,
        kind: str,
        form: Form,
        strides: tuple[int, ...],
        pads: tuple[int, ...],
        terms: Terms,
        cache: TemporalCache,
    ) -> Tensor:
        """Run oneDNN's convolution, which adds bias and residual while it writes.

        It can write into reused memory as well: zeros as a residual.
        """
        residual, residual_bias, _ = terms
        bias = self._bias(kind, form.offset)
        if residual_bias is not None:
            bias = bias + residual_bias
        bias = bias.to(x.dtype)
        ones = (1,) * len(strides)
        if residual is None:
            shape = output_size(x.shape, form.weight.shape, strides, pads)
            residual = _zeros_reused(cache, shape, x)
        if residual is None:
            return torch.ops.mkldnn._convolution_pointwise(
                x, form.weight, bias, pads, strides, ones, 1, "none", [], ""
            )
        return torch.ops.mkldnn._convolution_pointwise_.binary(
            residual, x, form.weight, bias, pads, strides, ones, 1, "add", 1.0, None, [], None
        )

    def _plain(
        self,
        x: Tensor,
        kind: str,
        form: Form,
        strides: tuple[int, ...],
        pads: tuple[int, ...],
        terms: Terms,
    ) -> Tensor:
        """Run the library's convolution, then add bias and residual in one pass if faster."""
        residual, residual_bias, biased = terms
        bias = self._bias(kind, form.offset)
        aligned = kind.endswith(ALIGNED)
        late = residual is not None or aligned or self.adds_bias_late(x)
        if x.shape[1] < form.weight.shape[1]:
            x = widened(x, form.weight.shape[1])
        y = cudnn.convolve(x, form.weight, None if late else bias.to(x.dtype), strides, pads)
        if aligned and len(bias) < y.shape[1]:
            y = y[:, : len(bias)].contiguous(memory_format=_order_of(y))
        if late and (biased or residual is not None):
            added = None if residual is None else _as_5d(residual)
            five = _as_5d(y)
            bias_residual(five, bias if biased else None, added, residual_bias, out=five)
        return y

    def sources(self) -> tuple[Tensor, ...]:
        """Return the parameters `[C_out, C_in, ...]` that the forms are derived from."""
        return (self.weight,)

    def _form(
        self, kind: str, x: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
    ) -> Form:
        """Return the cached form for a call, or derive it."""
        key = (kind, x.dtype)
        form = self.forms.get(key)
        sources = self.sources()
        if form is not None and form.holds(sources):
            return form
        # Outside inference mode, so that the form can be used in both modes.
        with torch.inference_mode(False), torch.no_grad():
            if not keeps_form(kind, self.weight.numel()):
                # The library reorders all taps itself.
                taps = self.weight.to(x.dtype) if kind == "volume" else None
                return Form(self._derive(kind, x.dtype) if taps is None else taps)
            weight, offset = self._derive(kind, x.dtype), self._offset(kind)
            packed = packs(x)
            if packed:
                ones = (1,) * len(stride)
                weight = torch.ops.mkldnn._reorder_convolution_weight(
                    weight, padding, stride, ones, 1, list(x.shape)
                )
            self.forms[key] = form = derived(weight, offset, sources, packed=packed)
        return form

    def _derive(self, kind: str, dtype: torch.dtype) -> Tensor:
        """Return the weight for calls of `kind`; it can be the parameter itself."""
        return derive(self.weight, kind, dtype)

    def _offset(self, kind: str) -> Tensor | None:
        """Return what the form `kind` derives from biases; None in this class."""
        return None

    def _bias(self, kind: str, offset: Tensor | None) -> Tensor:
        """Return the bias for the form `kind` with this offset."""
        if kind == "folded":
            return self.bias.repeat(4)
        return self.bias.repeat(SPREAD) if kind.endswith("spread") else self.bias

    def _spreads(self, x: Tensor, kind: str, residual: Tensor | None) -> bool:
        """Return whether neighbours in a row are computed as one pixel; see `SPREAD`."""
        return (
            kind in ("volume", "frame", "summed")
            and residual is None
            and self.weight.shape[-1] == 3
            and SPREAD * self.weight.shape[0] <= VECTOR
            and x.shape[-1] % SPREAD == 0
            and packs(x)
        )


class PointwiseConv(nn.Module):
    """A 1x1 or 1x1x1 convolution as one matrix product over the pixels.

    `ndim`, 2 or 3, is the number of kernel dimensions in the checkpoint.
    """

    def __init__(self, in_channels: int, out_channels: int, ndim: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *[1] * ndim))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def forward(
        self,
        x: Tensor,
        cache: TemporalCache | None = None,
        out_channels: int | None = None,
        *,
        biased: bool = True,
    ) -> Tensor:
        """Mix the channels of each pixel.

        Args:
            x: `[B, C_in, T, H, W]`, channels-last.
            cache: Frees memory when it runs out; None: the caller does.
            out_channels: Compute only the first channels; None: all.
            biased: Add the bias too.

        Returns:
            `[B, C_out, T, H, W]`, channels-last.
        """

        def product() -> Tensor:
            weight = self.weight.flatten(1)[:out_channels].to(x.dtype)
            bias = self.bias[:out_channels].to(x.dtype) if biased else None
            return F.linear(x.movedim(1, -1), weight, bias).movedim(-1, 1)

        return product() if cache is None else cache.attempt(product)


def drop_stale_forms(
    convs: Iterable[Conv], attempt: Callable[[Callable[[], Tensor]], Tensor]
) -> None:
    """Drop derived weights whose parameter was written to without autograd noticing.

    Replaced parameters and recorded writes are noticed in every call. This check is for writes such
    as `weight.data.copy_()` and runs once per video: it reads every weight, 4 ms for the 73 M of
    Wan 2.1's decoder.

    Args:
        convs: The convolutions.
        attempt: Runs an allocation, returning a tensor `[...]`, such as `Relief.finish`.
    """
    # Copied at once, because another thread may derive a form in the meantime.
    held = [
        (conv, key, form.checksum)
        for conv in convs
        for key, form in list(conv.forms.items())
        if form.checksum is not None
    ]
    with torch.inference_mode(False), torch.no_grad():
        now = {
            conv: attempt(functools.partial(checksum_of, conv.sources()))
            for conv in {conv for conv, _, _ in held}
        }
        # A weight on another device is noticed in the call, by its stamp.
        here = [entry for entry in held if entry[2].device == now[entry[0]].device]
        if not here:
            return
        # One transfer for all results, so that the GPU is synchronised once.
        differ = [
            attempt(functools.partial(torch.ne, now[conv], checksum)) for conv, _, checksum in here
        ]
        changed = attempt(lambda: torch.stack(differ)).tolist()
    for (conv, key, _), stale in zip(here, changed, strict=True):
        if stale:
            conv.forms.pop(key, None)


def _gathered(spread: Tensor) -> Tensor:
    """View `[B, 4 * C, ..., W / 4]` as `[B, C, ..., W]`; see `SPREAD`."""
    rows = spread.movedim(1, -1)
    return rows.unflatten(-1, (SPREAD, -1)).flatten(-3, -2).movedim(-1, 1)


def _order_of(x: Tensor) -> torch.memory_format:
    """Return channels-last for the dimensions of `x` `[N, C, H, W]` or `[B, C, T, H, W]`."""
    return torch.channels_last if x.ndim == 4 else torch.channels_last_3d


def _as_5d(x: Tensor) -> Tensor:
    """View `[N, C, H, W]` as `[N, C, 1, H, W]`."""
    return x if x.ndim == 5 else x.unsqueeze(2)


def _zeros_reused(cache: TemporalCache, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Return zeros in reused memory, `[B, C, T, H, W]` or `[N, C, H, W]`, or None."""
    five = shape if len(shape) == 5 else (*shape[:2], 1, *shape[2:])
    memory = cache.reused(five, like)
    if memory is None:
        return None
    return memory.zero_() if len(shape) == 5 else memory.squeeze(2).zero_()


def _records(x: Tensor, weight: Tensor) -> bool:
    """Return whether autograd would record a product of the two."""
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
