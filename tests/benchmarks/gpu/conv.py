"""Section `conv`: convolutions by channels, frames and candidate; upsampling."""

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fast_video_vae.kernels import ConvWeight, bias_residual, dispatch, measure, synchronize
from fast_video_vae.kernels.convolution import cudnn
from fast_video_vae.kernels.triton_ops import ops
from fast_video_vae.vae.layers.resample_conv import UpsampleConv2d
from fast_video_vae.vae.layers.temporal_cache import TemporalCache

from .rows import Case, Missing, Results
from .session import Session
from .turns import thread

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

_PLAIN, _BORDERED = "NDHWC", "NDHWC, border in the buffer"
_SEARCHED, _STOCK = "NDHWC, searched", "NCDHW with bias, as stock"
_KITCHEN = "comfy-kitchen, border in the buffer"
_SLICED = "slices of conv2d, tail apart"

# The tail is read where it is; a GPU has fewer tiles for some shapes.
_TILES = {f"our kernel, tile {number}": number for number in range(6)}

# Input and output channels of an upsampling, and the size of its input frame.
_UPSAMPLINGS = (
    (384, 192, 180, 320),
    (192, 96, 360, 640),
    (96, 48, 360, 640),
    (512, 512, 180, 320),
    (1024, 1024, 90, 160),
)
_SMALL_UPSAMPLINGS = tuple((into // 8, out // 8, 4, 4) for into, out, _, _ in _UPSAMPLINGS)


@dataclass(frozen=True)
class Shape:
    """A convolution of 3x3x3, or of 3x3 where `ndim` is 2; `frames` are those of the output."""

    into: int  # channels
    out: int
    frames: int
    height: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    ndim: int = 3

    @property
    def label(self) -> str:
        kernel = "x".join("3" * self.ndim)
        size = f"{self.frames}x{self.height}x{self.width}"
        return f"{kernel} {self.into} to {self.out} at {size}, {_DTYPES[self.dtype]}"

    @property
    def kinds(self) -> tuple[str, ...]:
        kinds = [_PLAIN, _BORDERED, _SEARCHED, _STOCK, *_TILES]
        if self.ndim == 3:
            kinds.append(_SLICED)
        if (self.ndim, self.dtype) == (3, torch.float16):
            kinds.append(_KITCHEN)
        return tuple(kinds)

    @property
    def flops(self) -> int:
        pixels = self.frames * self.height * self.width
        return 2 * 3**self.ndim * self.into * self.out * pixels


def shapes(session: Session) -> list[Shape]:
    """Return the convolutions, what decides most first, by the activations at 720x1280."""
    if session.small:
        some = [Shape(12, 12, frames, 8, 8) for frames in (4, 1)]
        some += [Shape(3, 16, 2, 8, 8), Shape(8, 16, 2, 8, 8)]
        return [*some, Shape(16, 16, 2, 8, 8, torch.float16), Shape(12, 12, 2, 8, 8, ndim=2)]
    wan = ((96, 720, 1280), (192, 360, 640), (384, 180, 320))
    # Of Wan 2.2, and of SeedVR2, which has 256 and 512 at about the same sizes.
    others = ((256, 360, 640), (512, 180, 320), (1024, 90, 160), (128, 720, 1280))
    found = [Shape(c, c, frames, h, w) for frames in (4, 1, 2, 8) for c, h, w in wan]
    # The first and last layers, and as many channels as cuDNN's kernels for tensor cores take.
    first, last = ((3, 96), (8, 96)), ((96, 3), (96, 8), (96, 16))
    ends = [Shape(i, o, frames, 720, 1280) for frames in (4, 1) for i, o in (*first, *last)]
    patched = ((12, 160), (16, 160), (256, 12), (256, 16))  # of Wan 2.2
    ends += [Shape(i, o, 4, 360, 640) for i, o in patched]
    found[3:3] = ends
    found += [Shape(c, c, 4, h, w, torch.float16) for c, h, w in wan]
    found += [Shape(c, c, 4, h, w) for c, h, w in others]
    return found + [Shape(c, c, 4, h, w, ndim=2) for c, h, w in (*wan, *others)]


def cases(session: Session) -> list[Case]:
    """Return one case per convolution, with a row per call, and one per upsampling."""
    found = [
        Case(shape.label, shape.kinds, functools.partial(_conv, session, shape))
        for shape in shapes(session)
    ]
    for into, out, height, width in session.pick(_UPSAMPLINGS, _SMALL_UPSAMPLINGS):
        label = f"2x {into} to {out} from 4x{height}x{width}, bf16"
        run = functools.partial(_upsampling, session, into, out, (height, width))
        found.append(Case(label, tuple(_UPSAMPLE), run))
    return found


def _conv(session: Session, shape: Shape) -> Results:
    calls = _calls(session, shape)
    if _KITCHEN in shape.kinds and _KITCHEN not in calls:
        yield _KITCHEN, Missing("comfy_kitchen is not installed, or has no fp16_conv3d")
    tiles = "our kernel has no such tile for this GPU and shape"
    for kind in _TILES.keys() - calls.keys():
        yield kind, Missing(tiles if session.cuda else "Triton is for GPUs")
    yield from _timed(session, calls, dict.fromkeys(calls, shape.flops))


def _calls(session: Session, shape: Shape) -> dict[str, Callable[[], Tensor]]:
    """Return the calls by kind; all give `[1, C, T, H, W]` or `[T, C, H, W]`."""
    ndim, dtype = shape.ndim, shape.dtype
    frames = (shape.frames,) if ndim == 2 else (1, shape.frames + 2)
    x = session.normal(*frames, shape.height, shape.width, shape.into, dtype=dtype)
    bordered = F.pad(x, (0, 0, 1, 1, 1, 1)).movedim(-1, 1)
    x = x.movedim(-1, 1)
    order = torch.channels_last if ndim == 2 else torch.channels_last_3d
    weight = session.normal(shape.out, shape.into, *[3] * ndim, dtype=dtype)
    weight = weight.contiguous(memory_format=order)
    bias = session.normal(shape.out, dtype=dtype)
    stride, pads, none = (1,) * ndim, (0, 1, 1)[-ndim:], (0,) * ndim
    stock = F.conv2d if ndim == 2 else F.conv3d
    dense, dense_weight = x.contiguous(), weight.contiguous()
    calls = {
        _PLAIN: lambda: cudnn.convolve(x, weight, None, stride, pads),
        _BORDERED: lambda: cudnn.convolve(bordered, weight, None, stride, none),
        _STOCK: lambda: stock(dense, dense_weight, bias, stride, pads),
    }
    if _KITCHEN in shape.kinds and (kitchen := _kitchen()) is not None:
        calls[_KITCHEN] = lambda: kitchen(bordered, weight, bias)
    calls |= _candidates(session, shape, x, weight)
    # Last, so that its first call includes the search but not the loading of libraries.
    calls[_SEARCHED] = lambda: cudnn.convolve(x, weight, None, stride, pads)
    return calls


def _candidates(
    session: Session, shape: Shape, x: Tensor, taps: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Return the calls of our kernel, by tile, and of slices, with the tail apart."""
    ones, pads = (1,) * shape.ndim, (1, 1)
    weight = ConvWeight(taps.shape, taps.dtype, taps.device, lambda: taps)
    options: dict[str, Any] = {"stride": ones, "padding": pads}
    if shape.ndim == 3:
        tail = x[:, :, :2].clone(memory_format=torch.channels_last_3d)
        x, options["tail"] = x[:, :, 2:], tail
    op = f"conv{shape.ndim}d"
    count = ops.variants(x, weight, ones, pads) if session.cuda else 0
    names = {kind: f"triton:{number}" for kind, number in _TILES.items() if number < count}
    if shape.ndim == 3:
        names[_SLICED] = "sliced"
    return {
        kind: functools.partial(dispatch.ask, name, op, x, weight, **options)
        for kind, name in names.items()
    }


def _kitchen() -> Callable[..., Tensor] | None:
    """Return comfy-kitchen's convolution, which ComfyUI installs, where it is there."""
    try:
        import comfy_kitchen
    except Exception:  # a broken installation raises anything
        return None
    return getattr(comfy_kitchen, "fp16_conv3d", None)


def _upsampling(session: Session, into: int, out: int, size: tuple[int, int]) -> Results:
    conv = UpsampleConv2d(into, out).requires_grad_(False)
    torch.nn.init.normal_(conv.weight)
    torch.nn.init.normal_(conv.bias)
    conv = conv.to(session.device, session.dtype)
    x = session.normal(1, 4, *size, into).movedim(-1, 1)
    calls = {kind: functools.partial(run, conv, x) for kind, run in _UPSAMPLE.items()}
    # Four taps for each of four phases, or nine for each pixel.
    grid = 4 * (size[0] + 1) * (size[1] + 1)
    pixels = 4 * 4 * size[0] * size[1]
    nine = 2 * 9 * into * out * pixels
    yield from _timed(
        session, calls, dict(zip(calls, (2 * 16 * into * out * grid, nine, nine), strict=True))
    )


def unfolded(conv: UpsampleConv2d, x: Tensor) -> Tensor:
    """Upsample `x` `[B, C, T, H, W]`, then run `conv` on the large frames, channels-last."""
    frames = x.movedim(1, -1).flatten(0, 1).movedim(-1, 1)
    large = F.interpolate(frames, scale_factor=2.0, mode="nearest")
    large = large.contiguous(memory_format=torch.channels_last)
    weight = conv.weight.to(x.dtype).contiguous(memory_format=torch.channels_last)
    y = cudnn.convolve(large, weight, None, (1, 1), (1, 1))
    video = y.movedim(1, -1).unflatten(0, (x.shape[0], -1)).movedim(-1, 1)
    return bias_residual(video, conv.bias, out=video)


def _as_stock(conv: UpsampleConv2d, x: Tensor) -> Tensor:
    """Upsample and convolve in NCHW, with the bias in the convolution."""
    frames = x.transpose(1, 2).flatten(0, 1).contiguous()
    large = F.interpolate(frames, scale_factor=2.0, mode="nearest-exact")
    return F.conv2d(large, conv.weight.contiguous(), conv.bias, padding=1)


_UPSAMPLE: dict[str, Callable[[UpsampleConv2d, Tensor], Tensor]] = {
    "folded": lambda conv, x: conv(x, TemporalCache()),
    "nearest, then 3x3, NDHWC": unfolded,
    "nearest, then 3x3, NCDHW, as stock": _as_stock,
}


def _timed(session: Session, calls: dict[str, Callable[[], Any]], flops: dict[str, int]) -> Results:
    """Time calls in turn, each in its own thread, because cuDNN caches plans per thread."""
    with ExitStack() as stack:
        able, first = {}, {}
        for name, call in calls.items():
            inside = functools.partial(_guarded, session, call, name == _SEARCHED)
            there = functools.partial(stack.enter_context(thread()), inside)
            start = time.perf_counter()
            try:
                there()
                synchronize(session.device)
            except Exception as error:  # the others are timed without it
                yield name, error.with_traceback(None)
                continue
            first[name] = time.perf_counter() - start
            able[name] = there
        seconds = measure.seconds(able, session.device, launches=False)
    for name, value in seconds.items():
        rate = flops[name] / value / 1e12
        yield name, {"ms": 1e3 * value, "tflops": rate, "first_ms": 1e3 * first[name]}


def _guarded(session: Session, call: Callable[[], Any], searches: bool) -> None:
    with torch.no_grad(), cudnn.searching(session.device) if searches else nullcontext():
        call()
