"""What the convolutions have in common: parameters, derived weights, and the call itself.

Everything is in channels-last memory. The parameter is the one owner of a weight, in the
checkpoint's shape and under its name. What a call needs beside it (the last temporal tap as a 2D
weight, another dtype, oneDNN's blocked layout) is derived from it once, and derived again when the
parameter is replaced or written to.
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
    SPREAD,
    VECTOR,
    Form,
    Forms,
    checksum_of,
    derive,
    derived,
    keeps_form,
    output_size,
    own_bytes,
    packs,
)
from .temporal_cache import TemporalCache


class Terms(NamedTuple):
    """What a convolution adds to its products.

    Attributes:
        residual: Of the shape of the result; its memory may become the result. What fails leaves it
            as it was.
        residual_bias: `C_out` numbers that `residual` still lacks.
        biased: The bias too. Without, where `adds_bias_late` says so, the caller adds it.
    """

    residual: Tensor | None = None
    residual_bias: Tensor | None = None
    biased: bool = True

    def of(self, change: Callable[[Tensor], Tensor]) -> "Terms":
        """The same with another residual, where there is one."""
        return self if self.residual is None else self._replace(residual=change(self.residual))


BIAS = Terms()


class Conv(nn.Module):
    """A convolution's parameters and the forms that are derived from them.

    The kernel is `(height, width)`, or `(time, height, width)`.

    Attributes:
        context: Frames before its own that it remembers.
        stride: Frames in for one out.
        times: Frames out for one in.
        first_form: The form that a first frame is convolved with.
        forms: The derived weights that are kept.
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
        """Bytes of the derived forms that do not share the parameter's memory."""
        return sum(own_bytes(form.weight, self.weight) for form in self.forms.values())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Conv":
        """Move or cast the parameters; what was derived from the old ones goes with them.

        On a GPU the weight itself is laid out as its convolution reads it, so that it is there
        once. In the memory of the host it stays as it came, and may be another module's too.
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
        """Whether the bias costs a pass of its own, which the next one can take over.

        oneDNN's convolutions add it for nothing. On CUDA PyTorch adds it after cuDNN's, one number
        at a time in channels-last memory.
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
            kind: The form of the weight, see `derive`.
            strides: Steps in each dimension of the form.
            padding: Zeros at both ends of height and of width.
            cache: Lends memory, and makes room where it runs out.
            terms: What is added.

        Returns:
            The result, channels-last.
        """
        pads = (0, *padding) if x.ndim == 5 else padding
        if _records(x, self.weight):
            return cache.attempt(functools.partial(self._recorded, x, kind, strides, pads, terms))
        if self._spreads(x, kind, terms.residual):
            steps = (*strides[:-1], SPREAD)
            return _gathered(self.convolve(x, f"{kind}, spread", steps, padding, cache))
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
        """The convolution out of operations that autograd knows."""
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
        """OneDNN's convolution, which adds bias and residual while it writes.

        Into large memory that was used before it writes as well: as a residual of zeros.
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
        """The library's convolution, and bias and residual in one pass where it is slow at them."""
        residual, residual_bias, biased = terms
        bias = self._bias(kind, form.offset)
        late = residual is not None or self.adds_bias_late(x)
        y = cudnn.convolve(x, form.weight, None if late else bias.to(x.dtype), strides, pads)
        if late and (biased or residual is not None):
            added = None if residual is None else _as_5d(residual)
            five = _as_5d(y)
            bias_residual(five, bias if biased else None, added, residual_bias, out=five)
        return y

    def sources(self) -> tuple[Tensor, ...]:
        """The parameters that the forms are derived from."""
        return (self.weight,)

    def _form(
        self, kind: str, x: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
    ) -> Form:
        """The form for a call, kept or derived."""
        key = (kind, x.dtype)
        form = self.forms.get(key)
        sources = self.sources()
        if form is not None and form.holds(sources):
            return form
        # Outside of inference mode, so that a form serves both there and here.
        with torch.inference_mode(False), torch.no_grad():
            if not keeps_form(kind, self.weight.numel()):
                # The library lays all taps out by itself.
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
        """The weight that a call of this kind multiplies with; maybe the parameter itself."""
        return derive(self.weight, kind, dtype)

    def _offset(self, kind: str) -> Tensor | None:
        """What the form `kind` derives of biases; nothing here."""
        return None

    def _bias(self, kind: str, offset: Tensor | None) -> Tensor:
        """The bias that goes with the form `kind`, whose offset is given."""
        if kind == "folded":
            return self.bias.repeat(4)
        return self.bias.repeat(SPREAD) if kind.endswith("spread") else self.bias

    def _spreads(self, x: Tensor, kind: str, residual: Tensor | None) -> bool:
        """Whether neighbours in a row should be computed as channels of one; see `SPREAD`."""
        return (
            kind in ("volume", "frame", "summed")
            and residual is None
            and self.weight.shape[-1] == 3
            and SPREAD * self.weight.shape[0] <= VECTOR
            and x.shape[-1] % SPREAD == 0
            and packs(x)
        )


class PointwiseConv(nn.Module):
    """A 1x1 or 1x1x1 convolution: one matrix product over the pixels, which need no other layout.

    The dimensions of its kernel, 2 or 3, are the checkpoint's.
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
        """Mix the channels of each pixel of `[B, C, T, H, W]`, channels-last.

        Args:
            x: The pixels.
            cache: Makes room where memory runs out; None: the caller does.
            out_channels: Compute only the first channels; None: all.
            biased: Add the bias too.
        """

        def product() -> Tensor:
            weight = self.weight.flatten(1)[:out_channels].to(x.dtype)
            bias = self.bias[:out_channels].to(x.dtype) if biased else None
            return F.linear(x.movedim(1, -1), weight, bias).movedim(-1, 1)

        return product() if cache is None else cache.attempt(product)


def drop_stale_forms(
    convs: Iterable[Conv], attempt: Callable[[Callable[[], Tensor]], Tensor]
) -> None:
    """Forget derived weights whose parameter was written to behind autograd's back.

    Replaced parameters and recorded writes are noticed at every call. This one is for writes like
    `weight.data.copy_()`, once per video: it reads every weight, 4 ms for the 73 M of Wan 2.1's
    decoder.

    Args:
        convs: The convolutions.
        attempt: Calls what allocates, such as `Relief.finish`.
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
        # What has moved to another device is noticed at the call, by its stamp.
        here = [entry for entry in held if entry[2].device == now[entry[0]].device]
        if not here:
            return
        # One transfer for all, so that a GPU is waited for once.
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


def _as_5d(x: Tensor) -> Tensor:
    """View `[N, C, H, W]` as `[N, C, 1, H, W]`."""
    return x if x.ndim == 5 else x.unsqueeze(2)


def _zeros_reused(cache: TemporalCache, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Zeros in memory that was used before, `[B, C, T, H, W]` or `[N, C, H, W]`."""
    five = shape if len(shape) == 5 else (*shape[:2], 1, *shape[2:])
    memory = cache.reused(five, like)
    if memory is None:
        return None
    return memory.zero_() if len(shape) == 5 else memory.squeeze(2).zero_()


def _records(x: Tensor, weight: Tensor) -> bool:
    """Whether autograd would record a product of the two."""
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
