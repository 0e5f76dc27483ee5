"""The causal convolution: 3D over a window of frames, 2D for the first frame of a video."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import Fused, is_out_of_memory, zero_of
from . import halo_conv, row_bands
from .causal_layer import CausalLayer
from .conv import BIAS, Conv, Terms
from .conv_weights import CodedForm, coded_form
from .frame_runs import Settling, fitted, halves, run_of
from .inputs.coding import Norm
from .inputs.fill import Fill, copied
from .temporal_cache import TemporalCache
from .workspace import Handover, bordered, within

# Bands of rows that a frame is cut into when memory is short.
_BANDS = 4

# What the convolution of codes does: it adds all terms.
_OF_CODES = Fused(sums=True, bias=True)


class _Window(NamedTuple):
    """The input of the products."""

    frames: Tensor  # `[B, C, T, H, W]`, or `[B, C, context + T, H, W]` joined
    border: int  # Rows and columns of zeros around each frame
    joined: bool = False  # The tail is in front of the new frames

    @property
    def inner(self) -> Tensor:
        """The frames without their border."""
        return within(self.frames, self.border)


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
        self.first_form = "summed" if replicate else "frame"
        self.padding = kernel[1] // 2
        self.growth = max(1, out_channels // in_channels)
        self.code_name, self.norm_before = "", None  # Its name in `Coding.names`, if it has one

    def follow(self, norm: Norm) -> None:
        """Allow codes in a video: the inputs are those of `norm` and SiLU."""
        # Not a module of this one: its parameters have the names of the layer around both.
        object.__setattr__(self, "norm_before", norm)

    def filled(self, norm: Callable[..., object], cache: TemporalCache) -> Fill:
        """Return `norm` (and SiLU), or a fill that writes codes if this convolution reads them."""
        coding = cache.coding
        if coding is None or not self.reads_codes(cache):
            return norm
        form = cache.attempt(functools.partial(self._form, "volume", torch.int8))
        assert isinstance(form, CodedForm)
        return coding.filling(norm, form.codes)

    def reads_codes(self, cache: TemporalCache) -> bool:
        """Return whether the input of this convolution is codes in the video of `cache`."""
        return cache.coding is not None and self.code_name in cache.coding.names

    def like(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Return the shape of `x` `[B, C, T, H, W]` in the dtype that `cache` has of the input."""
        if cache.coding is None or not self.reads_codes(cache):
            return x
        one = functools.partial(x.new_empty, (), dtype=cache.coding.dtype)
        return cache.attempt(one).expand(x.shape)

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
        held = [x.take() if isinstance(x, Handover) else x]
        if fill is None and self.reads_codes(cache):
            fill = copied
        if cache.shard is not None and self.padding:
            return halo_conv.convolve(self, held, cache, fill, terms)
        if cache.settling is not None and not cache.first:
            return self._settled(cache.settling, held[0], cache, fill, terms)
        fresh = held[0].shape[2]
        window: _Window | None = None
        try:
            window = self._entered(held[0], cache, fill, norm=terms.gamma is not None)
            if cache.first and not cache.single_frame and self.context:
                self.tail(held[0], cache)  # allocated here, because `keep` must not fail
            held.clear()
            pad = self.padding - window.border
            by_pointer = not window.joined
            y = self.of_window(window.frames, cache, (pad, pad), terms, by_pointer=by_pointer)
        except Exception as error:
            relief = cache.workspace.relief
            if relief is None or not is_out_of_memory(error):
                raise
            failed = error.with_traceback(None)
            relief.note("convolutions in smaller pieces")
        else:
            if not window.joined:
                self.keep(window.inner, cache)
            return y
        # Outside the except block: the error's traceback would keep tensors alive.
        if window is not None:
            if not held:
                new = window.inner[:, :, -fresh:]
                copy = functools.partial(new.clone, memory_format=torch.channels_last_3d)
                held, fill = [cache.attempt(copy)], None
                del new, copy
            if window.joined:
                cache.put_back(self, window.inner[:, :, : self.context])
        del window
        return self._in_pieces(failed, held[0], cache, fill, terms)

    def _entered(
        self, x: Tensor, cache: TemporalCache, fill: Fill | None, *, norm: bool
    ) -> "_Window":
        """Write `fill(x)` where the convolution reads it best; change nothing else on failure."""
        border = self._border(cache)
        if self.context and not (cache.first or self.fusing(x, cache, norm=norm).tail):
            return _Window(self._window(x, cache, fill), border, joined=True)
        return _Window(self._filled(x, cache, fill), border)

    def fusing(self, x: Tensor, cache: TemporalCache, *, norm: bool = False) -> Fused:
        """Return what the convolution of an input does without another pass."""
        pads = (self.padding, self.padding)
        if self.reads_codes(cache):
            return _OF_CODES
        if cache.shard is not None and self.padding:
            x, pads = halo_conv.input_like(self, x, cache)
        if cache.first:
            return self.route(x, self.first_form, (1, 1), pads, norm=norm).fused
        return self.route(x, "volume", (self.stride, 1, 1), pads, norm=norm).fused

    def _in_pieces(
        self,
        failed: Exception,
        x: Tensor,
        cache: TemporalCache,
        fill: Fill | None,
        terms: Terms,
    ) -> Tensor:
        """Run `forward` on halves of the frames or bands of rows, or raise `failed`."""
        pieces = []
        for part, steps in halves(x.shape[2], self.stride):
            added = terms.of(functools.partial(run_of, frames=steps, attempt=cache.attempt))
            run = run_of(x, part, cache.attempt)
            pieces.append(self.forward(run, cache, fill, added))
        if pieces:
            return cache.attempt(lambda: torch.cat(pieces, dim=2))
        rows = x.shape[3] // _BANDS
        if not rows or (self.replicate and fill is not None):  # its norm needs the whole frame
            raise failed
        take = copied if fill is None else fill
        return row_bands.convolve(self, take, x, cache, rows, terms)

    def _settled(
        self,
        settling: Settling,
        x: Tensor,
        cache: TemporalCache,
        fill: Fill | None,
        terms: Terms,
    ) -> Tensor:
        """Run `forward` on a chunk whose last frames are static."""
        cache.settling = settling = settling.behind(self.weight.shape[2], self.stride)
        frames = settling.needed if terms.residual is None else max(1, settling.needed)
        if not frames:
            batch, _, _, height, width = x.shape
            none = (batch, self.weight.shape[0], 0, height, width)
            return cache.attempt(functools.partial(x.new_empty, none))
        terms = terms.of(lambda residual: cache.attempt(lambda: fitted(residual, frames)))
        window = self._window(x, cache, fill, frames * self.stride)
        pad = self.padding - self._border(cache)
        return self.of_window(window, cache, (pad, pad), terms)

    def of_window(
        self,
        window: Tensor,
        cache: TemporalCache,
        pads: tuple[int, int],
        terms: Terms = BIAS,
        *,
        by_pointer: bool = False,
    ) -> Tensor:
        """Convolve a window of frames, or the first frame with the 2D weights.

        An allocation that fails does so before the residual is written.
        """
        if not cache.first:
            reads = by_pointer and self.context > 0
            before = functools.partial(self.tail, window, cache) if reads else None
            strides = (self.stride, 1, 1)
            return self.convolve(window, "volume", strides, pads, cache, terms, before)
        return self.convolve(window, self.first_form, (1, 1), pads, cache, terms)

    def _border(self, cache: TemporalCache) -> int:
        """Return the rows and columns around each frame of the window, which are of codes."""
        return self.padding if self.reads_codes(cache) else 0

    def _filled(self, x: Tensor, cache: TemporalCache, fill: Fill | None) -> Tensor:
        """Return `fill(x)` in scratch memory, codes with a border; `x` itself without `fill`."""
        if fill is None:
            return x
        border = self._border(cache)
        options = {"border": border} if border else {}
        filled = cache.scratch(bordered(x.shape, border), self.like(x, cache))
        cache.attempt(functools.partial(fill, x, out=filled, **options))
        return filled

    def _window(
        self, x: Tensor, cache: TemporalCache, fill: Fill | None, frames: int | None = None
    ) -> Tensor:
        """Join the tail and the new frames: `[B, C_in, context + T, H, W]`.

        The tail is updated; it is unchanged if this fails. With `frames`, `x` is cut or its last
        frame repeated to that length. Codes get a border of zeros.
        """
        if fill is None and frames is None:
            return cache.window(self, self.context, x)
        new = x if frames is None else x[:, :, :frames]
        batch, channels, fresh, height, width = new.shape
        frames = fresh if frames is None else frames
        shape = (batch, channels, self.context + frames, height, width)
        border = self._border(cache)
        window = cache.scratch(bordered(shape, border), self.like(new, cache))
        known, within_border = self.context + fresh, within(window, border)
        if fill is not None and fresh:
            inner, options = window[:, :, :known], {"border": border} if border else {}
            # Each attempt looks the tail up again: making room may have moved it.
            cache.attempt(lambda: fill(new, out=inner, tail=self.tail(new, cache), **options))
        else:
            if border:
                window.fill_(zero_of(window.dtype))
            within_border[:, :, : self.context] = self.tail(new, cache)
            within_border[:, :, self.context : known] = new
        window[:, :, known:] = window[:, :, known - 1 : known]
        if fill is None or fresh < frames:
            self.tail(new, cache).copy_(within_border[:, :, frames:])
        return window

    def tail(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Return the `[B, C_in, context, H, W]` tail before `x` from `cache`."""
        return cache.tail(self, self.context, self.like(x, cache))

    def _coded_form(self, kind: str) -> CodedForm:
        """Return the form `kind` in int8."""
        if self.norm_before is None:
            raise RuntimeError("the convolution follows no norm; expected one that writes codes")
        steps, sources = self.norm_before.steps(), self.sources(coded=True)
        return coded_form(self.weight, kind, steps, sources)

    def sources(self, *, coded: bool = False) -> tuple[Tensor, ...]:
        """Return the weight `[C_out, C_in, ...]`; if `coded`, the scales of the norm before too."""
        norm = self.norm_before
        return (self.weight, *norm.scales()) if coded and norm is not None else (self.weight,)

    def keep(self, x: Tensor, cache: TemporalCache) -> None:
        """Store the last frames of `x` `[B, C_in, T, H, W]` in `cache` as the new tail."""
        if cache.first and self.replicate and self.context:
            x = x.expand(-1, -1, self.context, -1, -1)
        cache.keep(self, self.context, x)
