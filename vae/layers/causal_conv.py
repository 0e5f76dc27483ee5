"""The causal convolution, and the convolutions that change the size of a frame."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels import ConvWeight, Route, WeightForm, code_route, merge_phases, zero_of
from .causal_layer import CausalLayer
from .conv import BIAS, Conv, Form, Terms, kept_form
from .conv_weights import coded_weight, derive
from .frame_runs import fitted
from .inputs.coding import Fill, Norm
from .temporal_cache import TemporalCache


class CausalConv3d(Conv, CausalLayer):
    """A 3D convolution that sees the current frame and earlier frames only.

    Wan 2.1 (`CausalConv3d`, wan/modules/vae.py) pads the video with zero frames in front. Here the
    tail of the previous chunk is read where it is, or written once together with the new frames.
    The spatial padding stays in the convolution, except for codes, which get a border. The first
    frame of a video only meets the last temporal tap, so it runs as a 2D convolution.

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
        codes = self._form(WeightForm("volume", torch.int8)).codes
        assert codes is not None
        return coding.filling(norm, codes)

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
        x: Tensor | list[Tensor],
        cache: TemporalCache,
        fill: Fill | None = None,
        terms: Terms = BIAS,
    ) -> Tensor:
        """Convolve `fill(x)` causally; `T` is 1 while `cache.first` is set.

        The tensor in a list is taken out, and freed before the products. With `cache.settling` the
        result has only the frames until it is static, which can be none without a residual.
        """
        given = x.pop() if isinstance(x, list) else x
        del x
        route = self.route(given, cache)
        if fill is None and route.reads_codes:
            fill = copied
        settles = cache.settling is not None and not cache.first
        if settles or (route.joined and self.context):
            frames = self._settled(cache, terms) if settles else given.shape[2]
            if not frames:
                shape = given.shape[0], self.weight.shape[0], 0, *given.shape[3:]
                return given.new_empty(shape)
            terms = terms.of(lambda residual: fitted(residual, frames) if settles else residual)
            window = self._joined(given, cache, fill, frames * self.stride if settles else frames)
            del given, fill
            return self.convolve(window, route, self.pads, cache, terms)
        border = self.padding if route.reads_codes else 0
        window = given
        if fill is not None:
            window = self._buffer(given, cache, given.shape[2], border)
            fill(given, out=window, border=border)
        del given, fill
        tail = self.tail(window, cache) if self.context and not cache.first else None
        y = self.convolve(window, route, self.pads, cache, terms, tail)
        if not cache.single_frame:
            self.keep(_within(window, border), cache)
        return y

    def into(
        self,
        norm: Any,  # noqa: ANN401, has `silu` and `gamma`
        conv: "CausalConv3d",
        x: Tensor,
        cache: TemporalCache,
        fill: Fill,
    ) -> tuple[list[Tensor], Fill | None]:
        """Convolve `fill(x)` for `conv`, which reads `norm` and SiLU of it.

        The result is in a list for `forward` to free it, with the fill of `conv`; None: it is done.
        """
        route, after = self.route(x, cache), conv.route(x, cache)
        if route.fused.norm and not (after.joined or after.reads_codes):
            return [self(x, cache, fill, Terms(gamma=norm.gamma))], None
        biased = route.fused.adds_bias
        y = [self(x, cache, fill, Terms(biased=biased, dtype=x.dtype))]
        silu = norm.silu if biased else functools.partial(norm.silu, bias=self.bias)
        return y, conv.filled(silu, cache)

    def _settled(self, cache: TemporalCache, terms: Terms) -> int:
        """Return the frames of the result until it is static, at least 1 with a residual."""
        assert cache.settling is not None
        cache.settling = cache.settling.behind(self.weight.shape[2], self.stride)
        needed = cache.settling.needed
        return needed if terms.residual is None else max(1, needed)

    def _buffer(self, x: Tensor, cache: TemporalCache, frames: int, border: int) -> Tensor:
        """Return scratch memory for `frames` frames like those of `x`, and a border."""
        height, width = (side + 2 * border for side in x.shape[3:])
        return cache.scratch((*x.shape[:2], frames, height, width), self.like(x, cache))

    def _joined(self, x: Tensor, cache: TemporalCache, fill: Fill | None, frames: int) -> Tensor:
        """Join the tail and the new frames: `[B, C_in, context + T, H, W]`; update the tail.

        `x` is cut, or its last frame repeated, to `frames`.
        """
        new = x if frames == x.shape[2] else x[:, :, :frames]
        border = self.padding if self._reads_codes(cache) else 0
        fresh, known = new.shape[2], self.context + new.shape[2]
        window = self._buffer(new, cache, self.context + frames, border)
        inner = _within(window, border)
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

    def keep(self, x: Tensor, cache: TemporalCache) -> None:
        """Store the last frames of `x` `[B, C_in, T, H, W]` in `cache` as the new tail."""
        if cache.first and self.replicate and self.context:
            x = x.expand(-1, -1, self.context, -1, -1)
        cache.keep(self, self.context, x)

    def _coded_form(self, form: WeightForm) -> Form:
        """Return a form in int8, with a dimension of time."""
        assert self.norm_before is not None  # names in `Coding` are of convolutions behind a norm
        steps, taps = self.norm_before.steps(), derive(self.weight, form.kind, torch.float32)
        coded, scale = coded_weight(taps.unsqueeze(2) if taps.ndim == 4 else taps, steps)
        coded = coded.contiguous(memory_format=torch.channels_last_3d)
        weight = ConvWeight(coded.shape, torch.int8, coded.device, lambda: coded)
        sources = self.sources(coded=True)
        return kept_form(weight, sources, scale=scale, codes=steps.reciprocal())

    def sources(self, *, coded: bool = False) -> tuple[Tensor, ...]:
        """Return the weight `[C_out, C_in, ...]`; if `coded`, the scales of the norm before too."""
        norm = self.norm_before
        return (self.weight, *norm.scales()) if coded and norm is not None else (self.weight,)


class UpsampleConv2d(Conv):
    """Nearest 2x in space and a 3x3 convolution of every frame, folded into one convolution.

    Each of the four phases of the large picture is a 2x2 convolution of the small one, with the sum
    of the taps that fall on one pixel: 16 products instead of 36, and no large picture between.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, (3, 3))

    def forward(
        self, x: Tensor, cache: TemporalCache, source: Tensor | None = None, times: int = 1
    ) -> Tensor:
        """Upsample, convolve, and add `source` `[B, C, T / times, H, W]` as in `merge_phases`."""
        batch, _, frames, height, width = x.shape
        route = self.routed(WeightForm("folded", x.dtype), (1, 1, 1), cache)
        biased = route.fused.adds_bias
        grid = self.convolve(x, route, (1, 1), cache, Terms(biased=biased))
        out = cache.reused((batch, grid.shape[1] // 4, frames, 2 * height, 2 * width), x)
        return merge_phases(grid, source, times, bias=None if biased else self.bias, out=out)


class StridedConv2d(Conv):
    """A 3x3 convolution of every frame with stride 2, zero-padded at the right and bottom only.

    A fourth row and column of zero taps in front replaces the padded copy of Wan's
    `ZeroPad2d((0, 1, 0, 1))`, as PyTorch pads both sides: 1-2 % more products of an encode.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, (3, 3))

    def forward(self, x: Tensor, cache: TemporalCache, terms: Terms = BIAS) -> Tensor:
        """Convolve to `[B, C_out, T, H / 2, W / 2]`."""
        route = self.routed(WeightForm("shifted", x.dtype), (1, 2, 2), cache)
        return self.convolve(x, route, (1, 1), cache, terms)


def copied(x: Tensor, *, out: Tensor, tail: Tensor | None = None, border: int = 0) -> None:
    """Copy frames, as a `Fill`."""
    inner = _within(out, border)
    known = 0 if tail is None else tail.shape[2]
    if border:
        out.fill_(zero_of(out.dtype))
    if x.shape[2]:
        inner[:, :, known:] = x
    if tail is not None:
        inner[:, :, :known] = tail
        tail.copy_(inner[:, :, inner.shape[2] - known :])


def _within(frames: Tensor, border: int) -> Tensor:
    """Return `frames` `[B, C, T, H, W]` without their `border`."""
    return frames[..., border:-border, border:-border] if border else frames
