"""Base of the convolutions: parameters, derived weights, and the call.

All memory is channels-last. The parameter holds the weight in the checkpoint's shape and under its
name. Other forms (the last temporal tap as a 2D weight, another dtype, a layout of the library) are
derived from it once, and again when the parameter is replaced or written to.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import (
    ConvWeight,
    Route,
    WeightForm,
    conv3d,
    conv_route,
    convolved,
    has_own_memory,
    int8_conv3d,
)
from .conv_weights import derive, form_shape, keeps_form, marks_of, own_bytes, proved_copy
from .temporal_cache import TemporalCache

# Most results of a module: sizes of frames and conditions come and go.
_MOST = 64

_Result = TypeVar("_Result")


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


@dataclass(frozen=True)
class Form:
    """A weight in the form of a call, with the state of the parameters it is derived from."""

    weight: ConvWeight  # The weight, derived with the first call
    offset: Tensor | None = None  # Values derived from biases; None: there are none
    sources: tuple[weakref.ref[Tensor], ...] = ()
    stamps: tuple[tuple[object, ...], ...] = ()  # `stamp_of` each source
    marks: tuple[Tensor, ...] = ()  # `marks_of` the sources; empty: the form is not kept
    scale: Tensor | None = None  # In int8: factors of the sums, `[C_out]`, float32
    codes: Tensor | None = None  # In int8: codes per unit of the inputs, `[C_in]`, float32

    def holds(self, sources: Sequence[Tensor]) -> bool:
        """Return whether `sources` `[...]` are the parameters of the form, unchanged."""
        return all(
            source() is now and stamp == stamp_of(now)
            for source, stamp, now in zip(self.sources, self.stamps, sources, strict=True)
        )


def kept_form(
    weight: ConvWeight,
    sources: Sequence[Tensor],
    offset: Tensor | None = None,
    scale: Tensor | None = None,
    codes: Tensor | None = None,
) -> Form:
    """Return a form to keep, with the state of its `sources`."""
    state = tuple(map(weakref.ref, sources)), tuple(map(stamp_of, sources)), marks_of(sources)
    return Form(weight, offset, *state, scale, codes)


def stamp_of(weight: Tensor) -> tuple[Any, ...]:
    """Return what changes if `weight` `[...]` is moved, cast or written to by a recorded op."""
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.device


class Kept(dict[Any, Any]):
    """Results of a module by key; a copied or pickled module starts without any."""

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()

    def of(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """Return the result for `key`, from `make` the first time; it must not hold the module."""
        result = self.get(key)
        if result is None:
            for oldest in list(self)[: len(self) - _MOST + 1]:
                self.pop(oldest, None)
            result = self[key] = make()
        return result


class Conv(nn.Module):
    """Parameters of a convolution (kernel `(time,) height, width`), and forms derived from them."""

    context: int = 0  # Earlier frames that it keeps in the cache
    stride: int = 1  # Input frames per output frame
    times: int = 1  # Output frames per input frame
    first_kind: str = "volume"  # Kind of the weight's form for a first frame

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.forms, self.routes = Kept(), Kept()

    def form_bytes(self) -> int:
        """Return the bytes of the derived forms that do not share the parameter's memory."""
        layouts = (each for form in self.forms.values() for each in form.weight.layouts)
        return sum(own_bytes(layout, self.weight) for layout in layouts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Conv":
        """Move or cast the parameters, and drop the forms derived from them."""
        # On a GPU the weight itself is stored in the layout of its convolution, so that it exists
        # once. On the CPU it stays unchanged, because it can be shared with another module.
        super()._apply(fn, recurse)
        weight = self.weight
        if has_own_memory(weight.device):
            order = torch.channels_last if weight.ndim == 4 else torch.channels_last_3d
            with torch.inference_mode(False), torch.no_grad():
                weight.data = weight.data.contiguous(memory_format=order)
        self.forms.clear()
        self.routes.clear()
        return self

    def routed(self, form: WeightForm, stride: tuple[int, int, int], cache: TemporalCache) -> Route:
        """Return the route of the calls with a form of the weight in the video of `cache`."""
        # Without a derived weight, which would need memory.
        return self.routes.of(
            (cache.route_token, cache.first, form),
            lambda: conv_route(self._weight(form), stride, video=not cache.first, form=form),
        )

    def convolve(
        self,
        x: Tensor,
        route: Route,
        padding: tuple[int, int],
        cache: TemporalCache,
        terms: Terms = BIAS,
        tail: Tensor | None = None,
    ) -> Tensor:
        """Convolve a video with the weight, stride and kernel of a route.

        `padding` is of height and width, on both sides. `tail` has the frames before the video,
        `[B, C_in, K, H, W]`.
        """
        assert route.form is not None
        residual, residual_bias, biased, gamma, dtype = terms
        form, out = self._form(route.form), residual
        bias = self._bias(route.form, form.offset) if biased else None
        if form.scale is not None:
            dtype = dtype if residual is None else residual.dtype
            options = {"residual": residual, "residual_bias": residual_bias, "out": out}
            return int8_conv3d(x, form.weight, form.scale, bias, dtype=dtype, **options)
        if not route.fused.sums:
            out = None
        elif residual is None and gamma is None:
            out = cache.reused(convolved(x, form.weight.shape, route.stride, padding, tail), x)
        return conv3d(
            x, form.weight, bias, stride=route.stride, padding=padding, tail=tail,
            residual=residual, residual_bias=residual_bias, gamma=gamma, out=out, route=route,
        )  # fmt: skip

    def sources(self, *, coded: bool = False) -> tuple[Tensor, ...]:
        """Return the parameters `[C_out, ...]` that forms are derived from; `coded`: in int8."""
        return (self.weight,)

    def _form(self, key: WeightForm) -> Form:
        """Return the kept form of the weight, or a new one."""
        form: Form | None = self.forms.get(key)
        coded = key.dtype == torch.int8
        sources = self.sources(coded=coded)
        if form is not None and form.holds(sources):
            return form
        weight = None if coded else self._weight(key)
        if weight is not None and not weight.keeps:
            return Form(weight)
        # Outside inference mode, so that the form can be used in both modes.
        with torch.inference_mode(False), torch.no_grad():
            if weight is None:
                made = self._coded_form(key)
            else:
                made = kept_form(weight, sources, self._offset(key))
            self.forms[key] = made
        return made

    def _coded_form(self, form: WeightForm) -> Form:
        """Return a form in int8, of a convolution that can read codes."""
        raise NotImplementedError

    def _weight(self, form: WeightForm) -> ConvWeight:
        """Return the weight in a form, which is derived when it is used."""
        keeps = keeps_form(form.kind, self.weight.numel())
        module = weakref.ref(self)  # which its forms do not keep alive

        def taps() -> Tensor:
            conv = module()
            assert conv is not None
            if not keeps and form.kind == "volume":
                return conv.weight.to(form.dtype)  # the library reorders all taps itself
            return conv._derive(form)

        return ConvWeight(self._shape(form), form.dtype, self.weight.device, taps, keeps=keeps)

    def _shape(self, form: WeightForm) -> tuple[int, ...]:
        """Return the shape of the weight in a form."""
        return form_shape(self.weight, form.kind)

    def _derive(self, form: WeightForm) -> Tensor:
        """Return the weight in a form; it can be the parameter itself."""
        return derive(self.weight, form.kind, form.dtype)

    def _offset(self, form: WeightForm) -> Tensor | None:
        """Return what a form derives from biases; None in this class."""
        return None

    def _bias(self, form: WeightForm, offset: Tensor | None) -> Tensor:
        """Return the bias for a form with this offset."""
        return self.bias.repeat(4) if form.kind == "folded" else self.bias


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
        weight, bias = self.weight, self.bias
        if x.device.type == "cpu" != weight.device.type:  # memory has run out there, or it is wrong
            weight, bias = (proved_copy(each, x.device) for each in (weight, bias))
        weight = weight.flatten(1)[outputs].to(x)
        bias = bias[outputs].to(x) if biased else None
        return F.linear(x.movedim(1, -1), weight, bias).movedim(-1, 1)

    def as_residual(self, x: Tensor, route: Route) -> Terms:
        """Return the result as terms of a convolution, whose pass adds the bias if it has one."""
        biased = route.fused.adds_bias
        return Terms(self(x, biased=biased), None if biased else self.bias)


def drop_stale_forms(convs: Iterable[Conv]) -> None:
    """Drop derived weights whose parameter was written to without autograd noticing.

    This is for writes such as `weight.data.copy_()`, once per video: it reads every weight, 4 ms on
    a CPU for the 73 M of Wan 2.1's decoder.
    """
    held = [
        (conv, key, form.marks, sources)
        for conv in convs
        # Copied at once, because another thread may derive a form in the meantime.
        for key, form in list(conv.forms.items())
        for sources in [conv.sources(coded=key.dtype == torch.int8)]
        # A weight on another device is noticed in the call, by its stamp.
        if form.marks and sources[0].device == form.marks[0].device
    ]
    if not held:
        return
    with torch.inference_mode(False), torch.no_grad():
        now = marks_of([source for *_, sources in held for source in sources])
        before = [mark for *_, marks, _ in held for mark in marks]
        # The bits, because the norm of a weight with NaN is NaN.
        bits = torch.stack([*now, *before]).view(torch.int64).view(2, -1)
        same = iter(bits[0].eq(bits[1]).tolist())
    for conv, key, marks, _ in held:
        unchanged = [next(same) for _ in marks]
        if not all(unchanged):
            conv.forms.pop(key, None)
