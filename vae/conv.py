"""Convolutions in channels-last memory: causal in time, sliced to 2D for a lone frame.

The parameter is the one owner of a weight, in the checkpoint's shape and under its name. What a
call needs beside it (the last temporal tap as a 2D weight, another dtype, oneDNN's blocked layout)
is derived from it once, and derived again when the parameter is replaced or written to.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import merge_phases
from .cache import TemporalCache
from .forms import Form, Forms, checksum_of, own_bytes, packs, stamp_of

# The forms of a larger weight are not kept, because those of Wan 2.2 would double its 705 M. The
# convolution then brings the weight to oneDNN's layout by itself: 57 ms instead of 30 for 1024
# channels in bf16, and 190 with a copy and a reordering of our own. The weights of Wan 2.1 (4.0 M
# at most) are worth keeping, and so are folded ones, which are sums.
_KEPT_ELEMENTS = 6_000_000

Fill = Callable[[Tensor, Tensor], object]
"""Writes a function of its first argument into its second, which has the same shape."""


class Conv(nn.Module):
    """A convolution's parameters and the forms that are derived from them.

    Args:
        in_channels: Channels in.
        out_channels: Channels out.
        kernel: Taps: `(height, width)`, or `(time, height, width)`.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self._forms = Forms()

    def form_bytes(self) -> int:
        """Bytes of the derived forms that do not share the parameter's memory."""
        return sum(own_bytes(form.weight, self.weight) for form in self._forms.values())

    def drop_forms(self) -> None:
        """Forget the derived forms."""
        self._forms.clear()

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
        self.drop_forms()
        return self

    def _convolve(
        self, x: Tensor, kind: str, stride: int, padding: int, residual: Tensor | None
    ) -> Tensor:
        """Convolve with the form `kind`, and add `residual`, whose memory may be taken."""
        ndim = 5 if kind == "volume" else 4
        strides = (stride, 1, 1) if ndim == 5 else (stride, stride)
        pads = (0, padding, padding) if ndim == 5 else (padding, padding)
        bias = self.bias.to(x.dtype)
        if kind == "folded":
            bias = bias.repeat(4)
        if _records(x, self.weight):
            convolve = F.conv2d if ndim == 4 else F.conv3d
            y = convolve(x, self._derive(kind, x.dtype), bias, stride=strides, padding=pads)
            return y if residual is None else y + residual
        weight, packed = self._form(kind, x, strides, pads)
        if packed:
            ones = (1,) * (ndim - 2)
            if residual is None:
                return torch.ops.mkldnn._convolution_pointwise(
                    x, weight, bias, pads, strides, ones, 1, "none", [], ""
                )
            return torch.ops.mkldnn._convolution_pointwise_.binary(
                residual, x, weight, bias, pads, strides, ones, 1, "add", 1.0, None, [], None
            )
        convolve = F.conv2d if ndim == 4 else F.conv3d
        y = convolve(x, weight, bias, stride=strides, padding=pads)
        return y if residual is None else residual.add_(y)

    def _form(
        self, kind: str, x: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
    ) -> tuple[Tensor, bool]:
        """Look the form up, or derive it: the weight, and whether it is in oneDNN's layout."""
        key = (kind, x.dtype)
        form = self._forms.get(key)
        if (
            form is not None
            and form.source() is self.weight
            and form.stamp == stamp_of(self.weight)
        ):
            return form.weight, form.packed
        # Outside of inference mode, so that a form serves both there and here.
        with torch.inference_mode(False), torch.no_grad():
            if kind != "folded" and self.weight.numel() > _KEPT_ELEMENTS:
                weight = self.weight.to(x.dtype)
                return weight if kind == "volume" else self._derive(kind, x.dtype), False
            weight = self._derive(kind, x.dtype)
            packed = packs(x)
            if packed:
                ones = (1,) * len(stride)
                weight = torch.ops.mkldnn._reorder_convolution_weight(
                    weight, padding, stride, ones, 1, list(x.shape)
                )
            self._forms[key] = Form(
                weight,
                packed,
                weakref.ref(self.weight),
                stamp_of(self.weight),
                checksum_of(self.weight),
            )
        return weight, packed

    def _derive(self, kind: str, dtype: torch.dtype) -> Tensor:
        """The weight that a call of this kind multiplies with; maybe the parameter itself.

        `volume`: all taps. `frame`: the last temporal tap. `shifted`: see `StridedConv2d`.
        `folded`: see `UpsampleConv2d`; the sums are made in float32.
        """
        if kind == "folded":
            return _fold(self.weight).to(dtype).contiguous(memory_format=torch.channels_last)
        weight = self.weight.to(dtype)
        if kind == "volume":
            return weight.contiguous(memory_format=torch.channels_last_3d)
        if kind == "frame" and weight.ndim == 5:
            weight = weight[:, :, -1]
        if kind == "shifted":
            grown = weight.new_zeros(*weight.shape[:2], weight.shape[2] + 1, weight.shape[3] + 1)
            grown[:, :, 1:, 1:] = weight
            weight = grown
        return weight.contiguous(memory_format=torch.channels_last)


class CausalConv3d(Conv):
    """A 3D convolution that sees the frame and the past alone.

    `CausalConv3d` of Wan 2.1, wan/modules/vae.py: the video is padded with zero frames in front
    only. Here the padding is the tail of the frames before, written once together with the new
    frames; the spatial padding stays in the convolution. The first frame of a video meets only the
    last temporal tap, so it runs as a 2D convolution.

    Args:
        in_channels: Channels in.
        out_channels: Channels out.
        kernel: Taps in (time, height, width); height and width are equal and odd.
        stride: Frames per step; with 2, the frames come in pairs after the first.

    Attributes:
        growth: How many times as large as its input its output is, at least 1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, int, int] = (3, 3, 3),
        stride: int = 1,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel)
        self.stride = stride
        self.context = kernel[0] - stride
        self.padding = kernel[1] // 2
        self.growth = max(1, out_channels // in_channels)

    def forward(
        self,
        x: Tensor,
        cache: TemporalCache,
        fill: Fill | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Convolve `fill(x)`, causally.

        Args:
            x: `[B, C_in, T, H, W]`, channels-last; one frame where the cache says that it is the
                first.
            cache: Gives the frames before `x`, and keeps the last of them.
            fill: Computed on the way into the convolution's input, such as a norm.
            residual: `[B, C_out, T, H, W]`, added to the result; its memory may become the result.

        Returns:
            `[B, C_out, T / stride, H, W]`, channels-last.
        """
        if cache.first:
            if fill is not None:
                filled = cache.scratch(x.shape, x)
                fill(x, filled)
                x = filled
            cache.keep(self, self.context, x)
            frame = None if residual is None else residual.squeeze(2)
            return self._convolve(x.squeeze(2), "frame", 1, self.padding, frame).unsqueeze(2)
        window = cache.window(self, self.context, x)
        new = window[:, :, self.context :]
        if fill is None:
            new.copy_(x)
        else:
            fill(x, new)
        cache.keep(self, self.context, window)
        return self._convolve(window, "volume", self.stride, self.padding, residual)

    def keep(self, x: Tensor, cache: TemporalCache) -> None:
        """Remember frames that passed by without being convolved."""
        cache.keep(self, self.context, x)


class PointwiseConv(nn.Module):
    """A 1x1 or 1x1x1 convolution: one matrix product over the pixels, which need no other layout.

    Args:
        in_channels: Channels in.
        out_channels: Channels out.
        ndim: Dimensions of the kernel, 2 or 3: the checkpoint's shape.
    """

    def __init__(self, in_channels: int, out_channels: int, ndim: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *[1] * ndim))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def forward(self, x: Tensor, out_channels: int | None = None) -> Tensor:
        """Mix the channels of each pixel.

        Args:
            x: `[B, C_in, T, H, W]`, channels-last.
            out_channels: Compute only the first channels; None: all.

        Returns:
            `[B, C_out, T, H, W]`, channels-last.
        """
        weight = self.weight.flatten(1)[:out_channels].to(x.dtype)
        y = F.linear(x.movedim(1, -1), weight, self.bias[:out_channels].to(x.dtype))
        return y.movedim(-1, 1)


class UpsampleConv2d(Conv):
    """Nearest 2x in space and a 3x3 convolution of every frame, folded into one.

    The rows `2 i` and `2 i + 1` of the large picture see only the rows `i - 1`, `i` and `i + 1` of
    the small one, so that each of its four phases is a 2x2 convolution of that, with the taps that
    fall on one pixel added up: 16 products instead of 36, and the large picture is never made.
    Zeros around the large picture are zeros around the small one.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, (3, 3))

    def forward(self, x: Tensor, source: Tensor | None = None, times: int = 1) -> Tensor:
        """Convolve, and add `source` as `merge_phases` does.

        Args:
            x: `[B, C_in, T, H, W]`, channels-last.
            source: `[B, C, T / times, H, W]`; None: nothing.
            times: Frames of the result for each of `source`.

        Returns:
            `[B, C_out, T, 2 H, 2 W]`, channels-last.
        """
        grid = self._convolve(_as_frames(x), "folded", 1, 1, None)
        return merge_phases(_as_video(grid, x.shape[0]), source, times)


class StridedConv2d(Conv):
    """A 3x3 convolution of every frame with stride 2, zero-padded at the right and the bottom only.

    PyTorch pads both sides alike. With a fourth row and column of zero taps in front, a padding of
    one on each side reads the very pixels that Wan's `ZeroPad2d((0, 1, 0, 1))` and padding 0 read,
    and no padded copy is made; the added products are 1-2 % of an encode.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, (3, 3))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`[B, C_in, T, H, W]` to `[B, C_out, T, H / 2, W / 2]`, both channels-last.

        `residual`, of the shape of the result, is added; its memory may become the result.
        """
        added = None if residual is None else _as_frames(residual)
        return _as_video(self._convolve(_as_frames(x), "shifted", 2, 1, added), x.shape[0])


def _fold(weight: Tensor) -> Tensor:
    """The taps of `UpsampleConv2d`: `[C_out, C_in, 3, 3]` to `[4 * C_out, C_in, 2, 2]`."""
    wide = weight if weight.dtype == torch.float64 else weight.float()
    # Rows of the even phase see (above, here + here), of the odd one (here + here, below).
    spread = torch.tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]]).to(wide)
    phases = torch.einsum("apk,bql,oikl->aboipq", spread, spread, wide)
    return phases.flatten(0, 2)


def drop_stale_forms(convs: Iterable[Conv]) -> None:
    """Forget derived weights whose parameter was written to behind autograd's back.

    Replaced parameters and recorded writes are noticed at every call. This one is for writes like
    `weight.data.copy_()`, once per video: it reads every weight, 4 ms for the 73 M of Wan 2.1's
    decoder.
    """
    # Copied at once, because another thread may derive a form in the meantime.
    held = [(conv, key, form) for conv in convs for key, form in list(conv._forms.items())]
    if not held:
        return
    with torch.inference_mode(False), torch.no_grad():
        now = {conv: checksum_of(conv.weight) for conv in {conv for conv, _, _ in held}}
        # What has moved to another device is noticed at the call, by its stamp.
        here = [entry for entry in held if entry[2].checksum.device == now[entry[0]].device]
        if not here:
            return
        # One transfer for all, so that a GPU is waited for once.
        changed = torch.stack([now[conv] != form.checksum for conv, _, form in here]).tolist()
    for (conv, key, _), stale in zip(here, changed, strict=True):
        if stale:
            conv._forms.pop(key, None)


def _as_frames(x: Tensor) -> Tensor:
    """View `[B, C, T, H, W]` as `[B * T, C, H, W]`, channels-last."""
    return x.permute(0, 2, 3, 4, 1).flatten(0, 1).permute(0, 3, 1, 2)


def _as_video(frames: Tensor, batch: int) -> Tensor:
    """View `[B * T, C, H, W]` as `[B, C, T, H, W]`, channels-last."""
    return frames.permute(0, 2, 3, 1).unflatten(0, (batch, -1)).permute(0, 4, 1, 2, 3)


def _records(x: Tensor, weight: Tensor) -> bool:
    """Whether autograd would record a product of the two."""
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
