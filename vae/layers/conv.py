"""What the convolutions have in common: parameters, derived weights, and the call itself.

Everything is in channels-last memory. The parameter is the one owner of a weight, in the
checkpoint's shape and under its name. What a call needs beside it (the last temporal tap as a 2D
weight, another dtype, oneDNN's blocked layout) is derived from it once, and derived again when the
parameter is replaced or written to.
"""

import functools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import bias_residual
from . import cudnn
from .conv_weights import Forms, checksum_of, derived, folded, own_bytes, packs
from .temporal_cache import TemporalCache

# A convolution to few channels leaves most of a vector of 16 unused: 96 to 3 channels ran at a
# seventh of the speed of 96 to 96. So 4 neighbours in a row are one pixel of four times as many
# channels: 10.5 ms instead of 18.9 for 2 x 192 x 192 in bf16, 40 instead of 63 in fp32.
_SPREAD = 4
_VECTOR = 16

# The forms of a larger weight are not kept, because those of Wan 2.2 would double its 705 M. The
# convolution then brings the weight to oneDNN's layout by itself: 57 ms instead of 30 for 1024
# channels in bf16, and 190 with a copy and a reordering of our own. The weights of Wan 2.1 (4.0 M
# at most) are worth keeping, and so are sums, which are smaller and costlier to make.
_KEPT_ELEMENTS = 6_000_000
_SUMS = ("folded", "summed", "shuffled")


def keeps_form(kind: str, numbers: int) -> bool:
    """Whether a form of a weight of so many numbers is kept for the next call."""
    return numbers <= _KEPT_ELEMENTS or kind.startswith(_SUMS)


class Conv(nn.Module):
    """A convolution's parameters and the forms that are derived from them.

    Args:
        in_channels: Channels in.
        out_channels: Channels out.
        kernel: Taps: `(height, width)`, or `(time, height, width)`.

    Attributes:
        context: Frames before its own that it remembers.
        stride: Frames in for one out.
        times: Frames out for one in.
        first_form: The form that a first frame is convolved with.
    """

    context: int = 0
    stride: int = 1
    times: int = 1
    first_form: str = "volume"

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

    def adds_bias_late(self, x: Tensor) -> bool:
        """Whether the bias costs a pass of its own, which the next one can take over.

        oneDNN's convolutions add it for nothing. On CUDA PyTorch adds it after cuDNN's, one number
        at a time in channels-last memory.
        """
        return x.device.type != "cpu" and not _records(x, self.weight)

    def _convolve(
        self,
        x: Tensor,
        kind: str,
        strides: tuple[int, ...],
        padding: tuple[int, int],
        cache: TemporalCache | None = None,
        residual: Tensor | None = None,
        residual_bias: Tensor | None = None,
        *,
        biased: bool = True,
    ) -> Tensor:
        """Convolve frames or a video with the form `kind`; add bias and `residual`.

        `padding` is of height and width. The memory of `residual` may be taken.
        """
        product = functools.partial(self._product, x, kind, strides, padding, cache, residual,
                                    residual_bias, biased=biased)  # fmt: skip
        return product() if cache is None else cache.attempt(product)

    def _product(
        self,
        x: Tensor,
        kind: str,
        strides: tuple[int, ...],
        padding: tuple[int, int],
        cache: TemporalCache | None,
        residual: Tensor | None,
        residual_bias: Tensor | None,
        *,
        biased: bool,
    ) -> Tensor:
        """`_convolve`, once."""
        ndim = x.ndim
        pads = (0, *padding) if ndim == 5 else padding
        if self._spreads(x, kind, residual):
            steps = (*strides[:-1], _SPREAD)
            return _gathered(self._convolve(x, f"{kind}, spread", steps, padding, cache))
        if _records(x, self.weight):
            convolve = F.conv2d if ndim == 4 else F.conv3d
            bias = self._bias(kind, self._offset(kind)).to(x.dtype)
            y = convolve(x, self._derive(kind, x.dtype), bias, stride=strides, padding=pads)
            y = y if residual is None else y + residual
            return y if residual_bias is None else y + _per_channel(residual_bias.to(x.dtype), ndim)
        weight, offset, packed = self._form(kind, x, strides, pads)
        bias = self._bias(kind, offset)
        if packed:
            if residual_bias is not None:
                bias = bias + residual_bias
            return self._convolve_packed(
                x, weight, bias.to(x.dtype), strides, pads, cache, residual
            )
        late = residual is not None or self.adds_bias_late(x)
        y = cudnn.convolve(x, weight, None if late else bias.to(x.dtype), strides, pads)
        if not late or not (biased or residual is not None):
            return y
        added = None if residual is None else _as_5d(residual)
        five = _as_5d(y)
        bias_residual(five, bias if biased else None, added, residual_bias, out=five)
        return y

    def _bias(self, kind: str, offset: Tensor | None) -> Tensor:
        """The bias that goes with the form `kind`, whose offset is given."""
        if kind == "folded":
            return self.bias.repeat(4)
        return self.bias.repeat(_SPREAD) if kind.endswith("spread") else self.bias

    def _offset(self, kind: str) -> Tensor | None:
        """What the form `kind` derives of biases; nothing here."""
        return None

    def sources(self) -> tuple[Tensor, ...]:
        """The parameters that the forms are derived from."""
        return (self.weight,)

    def _spreads(self, x: Tensor, kind: str, residual: Tensor | None) -> bool:
        """Whether neighbours in a row should be computed as channels of one; see `_SPREAD`."""
        return (
            kind in ("volume", "frame", "summed")
            and residual is None
            and self.weight.shape[-1] == 3
            and _SPREAD * self.weight.shape[0] <= _VECTOR
            and x.shape[-1] % _SPREAD == 0
            and packs(x)
            and not _records(x, self.weight)
        )

    def _convolve_packed(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        strides: tuple[int, ...],
        pads: tuple[int, ...],
        cache: TemporalCache | None,
        residual: Tensor | None,
    ) -> Tensor:
        """Call oneDNN's convolution, which adds bias and residual while it writes.

        Into large memory that was used before it writes as well: as a residual of zeros.
        """
        ones = (1,) * len(strides)
        if residual is None and cache is not None:
            kernel = weight.shape[2:]
            size = (
                (length + 2 * pad - taps) // step + 1
                for length, pad, taps, step in zip(x.shape[2:], pads, kernel, strides, strict=True)
            )
            residual = _reused(cache, (x.shape[0], weight.shape[0], *size), x)
        if residual is None:
            return torch.ops.mkldnn._convolution_pointwise(
                x, weight, bias, pads, strides, ones, 1, "none", [], ""
            )
        return torch.ops.mkldnn._convolution_pointwise_.binary(
            residual, x, weight, bias, pads, strides, ones, 1, "add", 1.0, None, [], None
        )

    def _form(
        self, kind: str, x: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None, bool]:
        """Look the form up, or derive it: weight, offset, and whether it is in oneDNN's layout."""
        key = (kind, x.dtype)
        form = self._forms.get(key)
        if form is not None and form.holds(self.sources()):
            return form.weight, form.offset, form.packed
        # Outside of inference mode, so that a form serves both there and here.
        with torch.inference_mode(False), torch.no_grad():
            if not keeps_form(kind, self.weight.numel()):
                weight = self.weight.to(x.dtype)
                return weight if kind == "volume" else self._derive(kind, x.dtype), None, False
            weight, offset = self._derive(kind, x.dtype), self._offset(kind)
            packed = packs(x)
            if packed:
                ones = (1,) * len(stride)
                weight = torch.ops.mkldnn._reorder_convolution_weight(
                    weight, padding, stride, ones, 1, list(x.shape)
                )
            self._forms[key] = derived(weight, offset, self.sources(), packed=packed)
        return weight, offset, packed

    def _derive(self, kind: str, dtype: torch.dtype) -> Tensor:
        """The weight that a call of this kind multiplies with; maybe the parameter itself.

        `volume`: all taps. `frame`: the last temporal tap. `summed`: the sum of the temporal taps.
        `shifted` and `folded`: see `resample.py`. Sums are made in float32 at least. `..., spread`:
        see `_SPREAD`.
        """
        if kind.endswith(", spread"):
            taps = self._derive(kind.removesuffix(", spread"), dtype)
            order = torch.channels_last if taps.ndim == 4 else torch.channels_last_3d
            wide = taps.new_zeros(_SPREAD, *taps.shape[:-1], taps.shape[-1] + _SPREAD - 1)
            for at in range(_SPREAD):
                wide[at, ..., at : at + taps.shape[-1]] = taps
            return wide.flatten(0, 1).contiguous(memory_format=order)
        if kind == "summed" and self.weight.ndim == 5:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            taps = self.weight.sum(2, dtype=wide).to(dtype)
            return taps.contiguous(memory_format=torch.channels_last)
        if kind == "folded":
            return folded(self.weight).to(dtype).contiguous(memory_format=torch.channels_last)
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
            cache: Makes room where memory runs out; None: the caller does.
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
    convs: Iterable[Conv], attempt: Callable[[Callable[[], Tensor]], Tensor] = lambda do: do()
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
    held = [(conv, key, form) for conv in convs for key, form in list(conv._forms.items())]
    if not held:
        return
    with torch.inference_mode(False), torch.no_grad():
        now = {
            conv: attempt(functools.partial(checksum_of, conv.sources()))
            for conv in {conv for conv, _, _ in held}
        }
        # What has moved to another device is noticed at the call, by its stamp.
        here = [entry for entry in held if entry[2].checksum.device == now[entry[0]].device]
        if not here:
            return
        # One transfer for all, so that a GPU is waited for once.
        differ = [
            attempt(functools.partial(torch.ne, now[conv], form.checksum)) for conv, _, form in here
        ]
        changed = attempt(lambda: torch.stack(differ)).tolist()
    for (conv, key, _), stale in zip(here, changed, strict=True):
        if stale:
            conv._forms.pop(key, None)


def _gathered(spread: Tensor) -> Tensor:
    """View `[B, 4 * C, ..., W / 4]` as `[B, C, ..., W]`; see `_SPREAD`."""
    rows = spread.movedim(1, -1)
    return rows.unflatten(-1, (_SPREAD, -1)).flatten(-3, -2).movedim(-1, 1)


def _as_5d(x: Tensor) -> Tensor:
    """View `[N, C, H, W]` as `[N, C, 1, H, W]`."""
    return x if x.ndim == 5 else x.unsqueeze(2)


def _per_channel(values: Tensor, ndim: int) -> Tensor:
    """View `[C]` so that it broadcasts over `[B, C, ...]`."""
    return values.view(1, -1, *[1] * (ndim - 2))


def _reused(cache: TemporalCache, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Zeros in memory that was used before, `[B, C, T, H, W]` or `[N, C, H, W]`."""
    five = shape if len(shape) == 5 else (shape[0], shape[1], 1, *shape[2:])
    memory = cache.reused(five, like)
    if memory is None:
        return None
    return memory.zero_() if len(shape) == 5 else memory.squeeze(2).zero_()


def _records(x: Tensor, weight: Tensor) -> bool:
    """Whether autograd would record a product of the two."""
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
