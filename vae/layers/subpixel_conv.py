"""A 1x1x1 convolution, a pixel shuffle and a 3x3x3 convolution, folded into one small convolution.

Only sums lie between the two convolutions, so they can be one. Along a doubled axis, the three taps
of a large pixel fall on two small pixels, and the phases that they meet depend on the phase of the
output. So each phase is a convolution of 2 x 2 x 2 small pixels (3 x 2 x 2 if time is not doubled)
with its own weights: 8 or 12 products of channels instead of 28, without the intermediate tensor.

The bias of the first convolution passes through the second one as a constant, except at the border,
where the large picture is zero-padded: the difference there is added to the result.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import WeightForm, merge_phases, product_dtype
from .causal_conv import copied
from .conv import Conv, PointwiseConv
from .temporal_cache import TemporalCache

# Height and width are always doubled.
_SIDE = 2

# Places of a form in the video, other than those of later frames.
_FIRST, _SECOND = "first frame", "after the first"


def taps_of(phase: int) -> list[tuple[int, int]]:
    """Return where the three taps of a phase of height or width fall: small pixel, its phase."""
    return [((phase + tap - 1) // 2 + 1 - phase, (phase + tap - 1) % 2) for tap in range(3)]


def times_of(phase: int, times: int, *, after_first: bool) -> list[tuple[int, int]]:
    """Return where the three temporal taps of a phase fall: small frame, and its phase.

    `after_first`: the previous frame is the first of the video, without a second phase. It is
    padded with copies of itself, so phase 0 replaces both.
    """
    if times == 1:
        return [(tap, 0) for tap in range(3)]
    places = [((phase + tap - 2) // 2 + 1, (phase + tap - 2) % 2) for tap in range(3)]
    return [(at, 0 if after_first and at == 0 else part) for at, part in places]


class ShuffleConv(Conv):
    """A 3x3x3 convolution folded with the 1x1x1 convolution and the pixel shuffle before it.

    `Upsample3D` of SeedVR2, models/video_vae_v3/modules/attn_video_vae.py.
    """

    def __init__(self, channels: int, upscale: PointwiseConv, times: int) -> None:
        super().__init__(channels, channels, (3, 3, 3))
        self.times = times
        self.context = 2 if times == 1 else 1  # Earlier small frames that it needs
        self._upscale = (upscale,)  # a tuple keeps it from being registered as a submodule

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Upsample to `[B, C, times * T, 2 H, 2 W]`; one frame for the first frame."""
        window = self._window(x, cache)
        if cache.first:
            cache.keep(self, self.context, window.expand(-1, -1, self.context, -1, -1))
            if self.times > 1 and not cache.single_frame:
                cache.after_first.add(self)
            return self._phases(window, _FIRST, 1, cache)
        if self not in cache.after_first:
            return self._phases(window, "", self.times, cache)
        cache.after_first.discard(self)
        seen = window if cache.same_shapes else window[:, :, :2]
        second = self._phases(seen, _SECOND, self.times, cache)
        if x.shape[2] == 1:
            return second
        frames = self._phases(window, "", self.times, cache)
        frames[:, :, : self.times] = second[:, :, : self.times]
        return frames

    def sources(self, *, coded: bool = False) -> tuple[Tensor, ...]:
        """Return the parameters `[C_out, ...]` that forms are derived from; none is `coded`."""
        (upscale,) = self._upscale
        return self.weight, self.bias, upscale.weight, upscale.bias

    def _window(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Join tail and new frames."""
        if cache.first:
            return x
        batch, channels, frames, height, width = x.shape
        window = cache.scratch((batch, channels, self.context + frames, height, width), x)
        copied(x, out=window, tail=cache.tail(self, self.context, x))
        return window

    def _phases(self, window: Tensor, place: str, times: int, cache: TemporalCache) -> Tensor:
        """Compute all phases of the large frames of a window."""
        out: Tensor | None = None
        for phase in range(times):
            form = WeightForm("shuffled", window.dtype, phase, place)
            route = self.routed(form, (1, 1, 1), cache)
            grid = self.convolve(window, route, (1, 1), cache)
            if out is None:
                batch, channels, frames, height, width = grid.shape
                shape = (batch, channels // 4, times * frames, 2 * height - 2, 2 * width - 2)
                out = cache.result(shape, grid)
            merged = merge_phases(grid, out=out[:, :, phase::times])
            self._add_missing(merged, form)
        assert out is not None
        return out

    def _shape(self, form: WeightForm) -> tuple[int, ...]:
        outputs, inputs = self.weight.shape[:2]
        frames = max(at for at, _ in _places(form, self.times)) + 1
        return 4 * outputs, inputs, *(() if form.place == _FIRST else (frames,)), 2, 2

    def _derive(self, form: WeightForm) -> Tensor:
        (upscale,) = self._upscale
        places = _places(form, self.times)
        wide = product_dtype(self.weight.device, form.dtype)
        taps, parts = self.weight.to(wide), upscale.weight.flatten(1).to(wide)
        weight = fold(taps, parts.unflatten(0, (_SIDE, _SIDE, self.times, -1)), places)
        weight = weight.to(form.dtype)
        if form.place == _FIRST:
            return weight.squeeze(2).contiguous(memory_format=torch.channels_last)
        return weight.contiguous(memory_format=torch.channels_last_3d)

    def _offset(self, form: WeightForm) -> Tensor:
        """Return `[C, 4, 4]`: the contribution of the biases to a picture of 4 x 4 pixels.

        It contains every case of a larger picture: corners, edges, and the phases of inner pixels.
        """
        (upscale,) = self._upscale
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        parts = upscale.bias.to(wide).unflatten(0, (_SIDE, _SIDE, self.times, -1))
        taps = self.weight.to(wide)
        result = self.bias.to(wide).view(-1, 1, 1)
        for tap, (_, phase) in enumerate(_places(form, self.times)):
            picture = parts[:, :, phase].permute(2, 0, 1).repeat(1, 2, 2)
            windows = F.unfold(picture[None], 3, padding=1)[0]  # [C * 9, 16], of no library
            result = result + (taps[:, :, tap].flatten(1) @ windows).unflatten(1, (4, 4))
        return result

    def _bias(self, form: WeightForm, offset: Tensor | None) -> Tensor:
        assert offset is not None
        return offset[:, 1:3, 1:3].flip(1, 2).flatten(1).T.flatten()

    def _add_missing(self, frames: Tensor, form: WeightForm) -> None:
        """Add the bias contribution minus the constant bias, which is 0 except at the border."""
        offset = self.forms[form].offset
        assert offset is not None
        *_, height, width = frames.shape
        for at, border, inner in ((0, 0, 2), (-1, 3, 1)):
            row = _line(offset[:, border], offset[:, inner], width)
            frames[..., at, :] += row.to(frames.dtype)[:, None]
            column = _line(offset[:, :, border], offset[:, :, inner], height)[:, 1:-1]
            frames[..., 1:-1, at] += column.to(frames.dtype)[:, None]


def fold(taps: Tensor, parts: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    """Fold two weights into the spatial phases of one temporal phase.

    From `taps` `[C_out, C, 3, 3, 3]` and `parts` `[2, 2, times, C, C_in]` (rows, columns, frames)
    to `[4 * C_out, C_in, frames, 2, 2]`; output channel `(2 a + b) * C_out + c` is phase a of rows
    and b of columns.
    """
    frames = max(at for at, _ in places) + 1
    weight = taps.new_empty(4, taps.shape[0], parts.shape[-1], frames, 2, 2)
    sides = range(_SIDE)
    for a, b, t, h, w in itertools.product(sides, sides, range(frames), sides, sides):
        met = [
            (taps[:, :, kt, kh, kw], parts[row, column, part])
            for kt, (at, part) in enumerate(places)
            for kh, (above, row) in enumerate(taps_of(a))
            for kw, (before, column) in enumerate(taps_of(b))
            if (at, above, before) == (t, h, w)
        ]
        left, right = zip(*met, strict=True)
        weight[2 * a + b, :, :, t, h, w] = torch.cat(left, 1) @ torch.cat(right)
    return weight.flatten(0, 1)


def _places(form: WeightForm, times: int) -> list[tuple[int, int]]:
    """Return where the temporal taps of a form fall: small frame and phase."""
    if form.place == _FIRST:
        return [(0, 0)] * 3
    return times_of(form.phase, times, after_first=form.place == _SECOND)


def _line(border: Tensor, inner: Tensor, length: int) -> Tensor:
    """Return `[C, length]`: `border` `[C, 4]`, whose middle repeats, less the middle of `inner`."""
    first, middle, last = border.split((1, 2, 1), 1)
    line = torch.cat([first, middle.repeat(1, length // 2 - 1), last], 1)
    return line - inner[:, 1:3].flip(1).repeat(1, length // 2)
