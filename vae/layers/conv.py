"""Base of the convolutions: parameters, derived weights, and the call.

All memory is channels-last. The parameter holds the weight in the checkpoint's shape and under its
name. Other forms (the last temporal tap as a 2D weight, another dtype, a layout of the library) are
derived from it once, and again when the parameter is replaced or written to.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import (
    ConvWeight,
    Route,
    conv2d,
    conv3d,
    conv_route,
    convolved,
    int8_conv3d,
    route_token,
)
from .conv_weights import (
    CodedForm,
    Form,
    Forms,
    derive,
    form_shape,
    keeps_form,
    kept_form,
    marks_of,
    own_bytes,
)
from .temporal_cache import TemporalCache


class Terms(NamedTuple):
    """Terms that a convolution adds to its products."""

    residual: Tensor | None = None  # Its memory may become the result
    residual_bias: Tensor | None = None  # `[C_out]`, added together with `residual`
    biased: bool = True  # Otherwise the caller adds the bias, where it would cost a pass
    gamma: Tensor | None = None  # Scales of `rms_norm_silu` of the sum
    dtype: torch.dtype = torch.float32  # Of the result for codes without a residual

    def of(self, change: Callable[[Tensor], Tensor]) -> "Terms":
        """Return a copy with `change(residual)`, if there is a residual `[B, C, T, H, W]`."""
        return self if self.residual is None else self._replace(residual=change(self.residual))


BIAS = Terms()


class Conv(nn.Module):
    """Parameters of a convolution and the forms derived from them.

    The kernel is `(height, width)` or `(time, height, width)`.
    """

    context: int = 0  # Earlier frames that it keeps in the cache
    stride: int = 1  # Input frames per output frame
    times: int = 1  # Output frames per input frame
    first_form: str = "volume"  # Form of the weight for a first frame

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.forms = Forms()
        self._routes: tuple[object, dict[object, Route]] = None, {}

    def __getstate__(self) -> Mapping[str, object]:
        # A copied or pickled module starts without routes, which other threads may be adding.
        return self.__dict__ | {"_routes": (None, {})}

    def form_bytes(self) -> int:
        """Return the bytes of the derived forms that do not share the parameter's memory."""
        layouts = (each for form in self.forms.values() for each in form.weight.layouts)
        return sum(own_bytes(layout, self.weight) for layout in layouts)

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

    def route(
        self,
        x: Tensor,
        kind: str,
        strides: tuple[int, ...],
        padding: tuple[int, int],
        *,
        norm: bool = False,
    ) -> Route:
        """Return the route of calls of `convolve` with these arguments, which is kept by size."""
        now, (token, routes) = route_token(), self._routes
        if now != token:
            routes = {}
            self._routes = now, routes
        key = kind, x.dtype, x.device, x.shape, strides, padding, norm
        route = routes.get(key)
        if route is None:
            # Without a derived weight, which would need memory.
            weight = self._weight(kind, x.dtype)
            given = x if x.ndim == weight.ndim else _as_frames(x)
            route = conv_route(given, weight, stride=strides, padding=padding, norm=norm)
            routes[key] = route
        return route

    def convolve(
        self,
        x: Tensor,
        kind: str,
        strides: tuple[int, ...],
        padding: tuple[int, int],
        cache: TemporalCache,
        terms: Terms = BIAS,
        tail: Tensor | None = None,
    ) -> Tensor:
        """Convolve a video, with a form that has taps in time or frame by frame.

        `padding` is of height and width, on both sides. `tail` has the frames before the video,
        `[B, C_in, K, H, W]`.
        """
        if not x.is_floating_point():
            return self._convolve_codes(x, kind, terms)
        residual, residual_bias, biased, gamma, _ = terms
        form, out = self._form(kind, x.dtype), None
        weight, bias = form.weight, self._bias(kind, form.offset) if biased else None
        route = self.route(x, kind, strides, padding, norm=gamma is not None)
        frames = x
        if weight.ndim == 4:
            frames = _as_frames(x)
            residual = residual if residual is None or x.shape[2] == 1 else _as_frames(residual)
        if route.fused.sums:
            out = residual
            if residual is None and gamma is None:
                out = _reused(frames, weight.shape, strides, padding, tail, cache)
        options = {"stride": strides, "padding": padding, "residual": residual, "out": out}
        options |= {"residual_bias": residual_bias, "gamma": gamma, "route": route}
        if weight.ndim == 5:
            return conv3d(x, weight, bias, tail=tail, **options)
        y = conv2d(frames, weight, bias, **options)
        return y if y.ndim == 5 else _as_video(y, x.shape[0])

    def _convolve_codes(self, x: Tensor, kind: str, terms: Terms) -> Tensor:
        """Convolve codes `[B, C_in, T, H, W]` with a border; the result is in `terms.dtype`."""
        form = self._form(kind, torch.int8)
        assert isinstance(form, CodedForm)
        residual = terms.residual
        options = {
            "residual": residual,
            "out": residual,
            "residual_bias": terms.residual_bias,
            "dtype": terms.dtype if residual is None else residual.dtype,
        }
        bias = self._bias(kind, None) if terms.biased else None
        return int8_conv3d(x, form.weight, form.scale, bias, **options)

    def sources(self, *, coded: bool = False) -> tuple[Tensor, ...]:
        """Return the parameters `[C_out, ...]` that forms are derived from; `coded`: in int8."""
        return (self.weight,)

    def _form(self, kind: str, dtype: torch.dtype) -> Form:
        """Return the kept form for calls of `kind` in `dtype`, or a new one."""
        key = (kind, dtype)
        form = self.forms.get(key)
        sources = self.sources(coded=dtype == torch.int8)
        if form is not None and form.holds(sources):
            return form
        if dtype == torch.int8:
            with torch.inference_mode(False), torch.no_grad():
                self.forms[key] = form = self._coded_form(kind)
            return form
        weight = self._weight(kind, dtype)
        if not weight.keeps:
            return Form(weight)
        # Outside inference mode, so that the form can be used in both modes.
        with torch.inference_mode(False), torch.no_grad():
            self.forms[key] = form = kept_form(weight, self._offset(kind), sources)
        return form

    def _coded_form(self, kind: str) -> Form:
        """Return the form `kind` in int8, of a convolution that can read codes."""
        raise NotImplementedError

    def _weight(self, kind: str, dtype: torch.dtype) -> ConvWeight:
        """Return the weight for calls of `kind` in `dtype`, which is derived when it is used."""
        keeps = keeps_form(kind, self.weight.numel())
        module = weakref.ref(self)  # which its forms do not keep alive

        def taps() -> Tensor:
            conv = module()
            assert conv is not None
            if not keeps and kind == "volume":
                return conv.weight.to(dtype)  # the library reorders all taps itself
            return conv._derive(kind, dtype)

        return ConvWeight(self._shape(kind), dtype, self.weight.device, taps, keeps=keeps)

    def _shape(self, kind: str) -> tuple[int, ...]:
        """Return the shape of the weight for calls of `kind`."""
        return form_shape(self.weight, kind)

    def _derive(self, kind: str, dtype: torch.dtype) -> Tensor:
        """Return the weight for calls of `kind`; it can be the parameter itself."""
        return derive(self.weight, kind, dtype)

    def _offset(self, kind: str) -> Tensor | None:
        """Return what the form `kind` derives from biases; None in this class."""
        return None

    def _bias(self, kind: str, offset: Tensor | None) -> Tensor:
        """Return the bias for the form `kind` with this offset."""
        return self.bias.repeat(4) if kind == "folded" else self.bias


class PointwiseConv(nn.Module):
    """A 1x1 or 1x1x1 convolution as one matrix product over the pixels.

    `ndim`, 2 or 3, is the number of kernel dimensions in the checkpoint.
    """

    def __init__(self, in_channels: int, out_channels: int, ndim: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *[1] * ndim))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def forward(self, x: Tensor, outputs: slice = slice(None), *, biased: bool = True) -> Tensor:
        """Mix the channels of each pixel, on the device of `x`."""
        weight = self.weight.flatten(1)[outputs].to(x)
        bias = self.bias[outputs].to(x) if biased else None
        return F.linear(x.movedim(1, -1), weight, bias).movedim(-1, 1)


def _as_frames(x: Tensor) -> Tensor:
    """View `[B, C, T, H, W]` as `[B * T, C, H, W]`, channels-last."""
    if x.shape[2] == 1:
        return x.squeeze(2)
    return x.permute(0, 2, 3, 4, 1).flatten(0, 1).permute(0, 3, 1, 2)


def _as_video(frames: Tensor, batch: int) -> Tensor:
    """View `[B * T, C, H, W]` as `[B, C, T, H, W]`, channels-last."""
    if frames.shape[0] == batch:
        return frames.unsqueeze(2)
    return frames.permute(0, 2, 3, 1).unflatten(0, (batch, -1)).permute(0, 4, 1, 2, 3)


def drop_stale_forms(convs: Iterable[Conv]) -> None:
    """Drop derived weights whose parameter was written to without autograd noticing.

    Replaced parameters and recorded writes are noticed in every call. This check is for writes such
    as `weight.data.copy_()` and runs once per video: it reads every weight, 4 ms on a CPU for the
    73 M of Wan 2.1's decoder. A GPU gets a handful of launches, and the host waits once.
    """
    # Copied at once, because another thread may derive a form in the meantime. A weight on another
    # device is noticed in the call, by its stamp.
    held = [
        (conv, key, form.marks, sources)
        for conv in convs
        for key, form in list(conv.forms.items())
        if form.marks
        and form.marks[0].device == (sources := conv.sources(coded=key[1] == torch.int8))[0].device
    ]
    if not held:
        return
    each = {id(source): source for *_, sources in held for source in sources}
    before = [mark for *_, marks, _ in held for mark in marks]

    with torch.inference_mode(False), torch.no_grad():
        marks = dict(zip(each, marks_of(list(each.values())), strict=True))
        now = [marks[id(source)] for *_, sources in held for source in sources]
        # The bits, because the norm of a weight with NaN is NaN.
        bits = [torch.stack(numbers).view(torch.int64) for numbers in (now, before)]
        stale = iter(torch.ne(*bits).tolist())
    for conv, key, marks, _ in held:
        if any([next(stale) for _ in marks]):  # noqa: C419, all of them
            conv.forms.pop(key, None)


def _reused(
    x: Tensor,
    weight_shape: tuple[int, ...],
    strides: tuple[int, ...],
    padding: tuple[int, int],
    tail: Tensor | None,
    cache: TemporalCache,
) -> Tensor | None:
    """Return reused memory for a result `[B, C, T, H, W]` or `[N, C, H, W]`, or None."""
    if x.ndim == 4:
        batch, channels, *size = convolved(x, weight_shape, strides, padding)
        memory = cache.reused((batch, channels, 1, *size), x)
        return None if memory is None else memory.squeeze(2)
    return cache.reused(convolved(x, weight_shape, strides, (0, *padding), tail), x)
