"""The causal convolution: 3D over a window of frames, 2D for the first frame of a video."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels import Route, WeightForm, code_route
from .causal_layer import CausalLayer
from .conv import BIAS, Conv, Terms
from .conv_weights import CodedForm, coded_form
from .frame_runs import Settling, fitted
from .inputs.coding import Norm
from .temporal_cache import TemporalCache
from .workspace import Fill, Handover, bordered, copied, within


class CausalConv3d(Conv, CausalLayer):
    """A 3D convolution that sees the current frame and earlier frames only.

    `CausalConv3d` of Wan 2.1, wan/modules/vae.py, pads the video with zero frames in front. Here
    the padding is the tail of the previous chunk: the convolution reads it where it is, or it is
    written once together with the new frames. The spatial padding stays in the convolution, except
    for codes, which get a border. The first frame of a video only meets the last temporal tap, so
    it runs as a 2D convolution.

    With `replicate` the video is padded with copies of its first frame, as in SeedVR2
    (models/video_vae_v3/modules/causal_inflation_lib.py): the first frame runs as a 2D convolution
    with the sum of the temporal taps.

    `kernel` is (time, height, width), the last two equal and odd.
    """

    norm_before: Norm | None  # The norm that writes the input, if this convolution can read codes

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, int, int] = (3, 3, 3),
        stride: int = 1,
        *,
        replicate: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel)
        self.stride = stride
        self.replicate = replicate
        self.context = kernel[0] - stride
        self.first_kind = "summed" if replicate else "frame"
        self.padding = kernel[1] // 2
        self.pads = (self.padding, self.padding)
        self.growth = max(1, out_channels // in_channels)
        self.code_name, self.norm_before = "", None  # Its name in `Coding.names`, if it has one

    def follow(self, norm: Norm) -> None:
        """Allow codes in a video: the inputs are those of `norm` and SiLU."""
        # Not a module of this one: its parameters have the names of the layer around both.
        object.__setattr__(self, "norm_before", norm)

    def filled(self, norm: Callable[..., object], cache: TemporalCache) -> Fill:
        """Return `norm` (and SiLU), or a fill that writes codes if this convolution reads them."""
        coding = cache.coding
        if coding is None or not self._reads_codes(cache):
            return norm
        form = self._form(WeightForm("volume", torch.int8))
        assert isinstance(form, CodedForm)
        return coding.filling(norm, form.codes)

    def _reads_codes(self, cache: TemporalCache) -> bool:
        return cache.coding is not None and self.code_name in cache.coding.names

    def like(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Return the shape of `x` `[B, C, T, H, W]` in the dtype that `cache` has of the input."""
        if cache.coding is None or not self._reads_codes(cache):
            return x
        return x.new_empty((), dtype=cache.coding.dtype).expand(x.shape)

    def route(self, x: Tensor, cache: TemporalCache) -> Route:
        """Return the route of the calls in the video of `cache`, for inputs in the dtype of `x`."""
        coded, first = self._reads_codes(cache), cache.first

        def decided() -> Route:
            form = WeightForm(self.first_kind if first else "volume", dtype)
            if coded:
                return code_route(form, joined=not first)
            return self.routed(form, (1 if first else self.stride, 1, 1), cache)

        dtype = torch.int8 if coded else x.dtype
        return self.routes.of((cache.route_token, first, dtype), decided)

    def forward(
        self,
        x: Tensor | Handover,
        cache: TemporalCache,
        fill: Fill | None = None,
        terms: Terms = BIAS,
    ) -> Tensor:
        """Convolve `fill(x)` causally; `T` is 1 while `cache.first` is set.

        A `Handover` is freed before the products. With `cache.settling` the result has only the
        frames until it is static, which can be none without a residual.
        """
        given = x.take() if isinstance(x, Handover) else x
        del x
        route = self.route(given, cache)
        if fill is None and route.reads_codes:
            fill = copied
        if cache.settling is not None and not cache.first:
            return self._settled(cache.settling, given, cache, fill, terms, route)
        if route.joined and self.context:
            window = self._joined(given, cache, fill)
            del given, fill
            return self.convolve(window, route, self.pads, cache, terms)
        window = self._filled(given, cache, fill, route)
        del given, fill
        tail = self.tail(window, cache) if self.context and not cache.first else None
        y = self.convolve(window, route, self.pads, cache, terms, tail)
        if not cache.single_frame:
            self.keep(within(window, self.padding if route.reads_codes else 0), cache)
        return y

    def into(
        self,
        norm: Any,  # noqa: ANN401, has `silu` and `gamma`
        conv: "CausalConv3d",
        x: Tensor,
        cache: TemporalCache,
        fill: Fill,
    ) -> tuple[Handover, Fill | None]:
        """Convolve `fill(x)` for `conv`, which reads `norm` and SiLU of it.

        Returns:
            The result, and how `conv` fills its window from it; None: it has the norm already.
        """
        route, after = self.route(x, cache), conv.route(x, cache)
        if route.fused.norm and not (after.joined or after.reads_codes):
            return Handover(self(x, cache, fill, Terms(gamma=norm.gamma))), None
        biased = route.fused.adds_bias
        y = Handover(self(x, cache, fill, Terms(biased=biased, dtype=x.dtype)))
        silu = norm.silu if biased else functools.partial(norm.silu, bias=self.bias)
        return y, conv.filled(silu, cache)

    def _settled(
        self,
        settling: Settling,
        x: Tensor,
        cache: TemporalCache,
        fill: Fill | None,
        terms: Terms,
        route: Route,
    ) -> Tensor:
        """Run `forward` on a chunk whose last frames are static."""
        cache.settling = settling = settling.behind(self.weight.shape[2], self.stride)
        frames = settling.needed if terms.residual is None else max(1, settling.needed)
        if not frames:
            return x.new_empty(x.shape[0], self.weight.shape[0], 0, *x.shape[3:])
        terms = terms.of(lambda residual: fitted(residual, frames))
        window = self._joined(x, cache, fill, frames * self.stride)
        return self.convolve(window, route, self.pads, cache, terms)

    def _border(self, cache: TemporalCache) -> int:
        """Return the rows and columns around each frame of the window, which are of codes."""
        return self.padding if self._reads_codes(cache) else 0

    def _buffer(self, x: Tensor, cache: TemporalCache, frames: int) -> Tensor:
        """Return scratch memory for `frames` frames like those of `x` and their border."""
        shape = bordered((*x.shape[:2], frames, *x.shape[3:]), self._border(cache))
        return cache.scratch(shape, self.like(x, cache))

    def _filled(self, x: Tensor, cache: TemporalCache, fill: Fill | None, route: Route) -> Tensor:
        """Return `fill(x)` in scratch memory; `x` itself without `fill`."""
        if fill is None:
            return x
        coded = route.reads_codes
        filled = self._buffer(x, cache, x.shape[2]) if coded else cache.scratch(x.shape, x)
        fill(x, out=filled, border=self.padding if coded else 0)
        return filled

    def _joined(
        self, x: Tensor, cache: TemporalCache, fill: Fill | None, frames: int | None = None
    ) -> Tensor:
        """Join the tail and the new frames: `[B, C_in, context + T, H, W]`; update the tail.

        With `frames`, `x` is cut or its last frame repeated to that length.
        """
        new = x if frames is None else x[:, :, :frames]
        fresh, border = new.shape[2], self._border(cache)
        frames, known = fresh if frames is None else frames, self.context + fresh
        window = self._buffer(new, cache, self.context + frames)
        inner = within(window, border)
        tail = self.tail(inner, cache)
        write = copied if fill is None or not fresh else fill
        write(new, out=window[:, :, :known], tail=tail, border=border)
        if fresh < frames:
            window[:, :, known:] = window[:, :, known - 1 : known]
            tail.copy_(inner[:, :, frames:])
        return window

    def tail(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Return the `[B, C_in, context, H, W]` tail before `x` from `cache`."""
        return cache.tail(self, self.context, self.like(x, cache))

    def _coded_form(self, form: WeightForm) -> CodedForm:
        """Return a form in int8."""
        if self.norm_before is None:
            raise RuntimeError("the convolution follows no norm; expected one that writes codes")
        steps, sources = self.norm_before.steps(), self.sources(coded=True)
        return coded_form(self.weight, form.kind, steps, sources)

    def sources(self, *, coded: bool = False) -> tuple[Tensor, ...]:
        """Return the weight `[C_out, C_in, ...]`; if `coded`, the scales of the norm before too."""
        norm = self.norm_before
        return (self.weight, *norm.scales()) if coded and norm is not None else (self.weight,)

    def keep(self, x: Tensor, cache: TemporalCache) -> None:
        """Store the last frames of `x` `[B, C_in, T, H, W]` in `cache` as the new tail."""
        if cache.first and self.replicate and self.context:
            x = x.expand(-1, -1, self.context, -1, -1)
        cache.keep(self, self.context, x)
