"""Section `conv`: convolutions by width, with and without cuDNN's search, and the upsampling."""

import functools
import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fast_video_vae.kernels import bias_residual, measure, synchronize
from fast_video_vae.vae.layers import cudnn
from fast_video_vae.vae.layers.resample_conv import UpsampleConv2d
from fast_video_vae.vae.layers.temporal_cache import TemporalCache

from .rows import Case, Results
from .session import Session
from .turns import thread

# Channels, height and width of the activations in a decode of 720x1280 by Wan 2.1, Wan 2.2 and
# SeedVR2. SeedVR2 has 128 channels, and 256 and 512 at sizes close to those of Wan 2.2.
_SIZES = (
    (96, 720, 1280),
    (192, 360, 640),
    (384, 180, 320),
    (256, 360, 640),
    (512, 180, 320),
    (1024, 90, 160),
    (128, 720, 1280),
)
_SMALL_SIZES = tuple((width // 8, 8, 8) for width, _, _ in _SIZES)

# Input and output channels of an upsampling, and the size of its input frame.
_UPSAMPLINGS = (
    (384, 192, 180, 320),
    (192, 96, 360, 640),
    (96, 48, 360, 640),
    (512, 512, 180, 320),
    (1024, 1024, 90, 160),
)
_SMALL_UPSAMPLINGS = tuple((into // 8, out // 8, 4, 4) for into, out, _, _ in _UPSAMPLINGS)

# Output frames; a causal convolution reads two more.
_FRAMES = 4

_KINDS = {"3x3x3": 3, "3x3": 2}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_SEARCHED, _PLAIN, _STOCK = "NDHWC, searched", "NDHWC, not searched", "NCDHW with bias, as stock"


def cases(session: Session) -> list[Case]:
    """Return one case per width, kernel and dtype, and one per upsampling."""
    found = []
    for width, *size in session.pick(_SIZES, _SMALL_SIZES):
        for (kind, ndim), (short, dtype) in itertools.product(_KINDS.items(), _DTYPES.items()):
            label = f"{kind} {width} at {_FRAMES}x{size[0]}x{size[1]}, {short}"
            run = functools.partial(_conv, session, ndim, width, size, dtype)
            found.append(Case(label, (_SEARCHED, _PLAIN, _STOCK), run))
    for into, out, height, width in session.pick(_UPSAMPLINGS, _SMALL_UPSAMPLINGS):
        label = f"2x {into} to {out} from {_FRAMES}x{height}x{width}, bf16"
        run = functools.partial(_upsampling, session, into, out, (height, width))
        found.append(Case(label, tuple(_UPSAMPLE), run))
    return found


def _conv(session: Session, ndim: int, width: int, size: list[int], dtype: torch.dtype) -> Results:
    shape = (_FRAMES, *size) if ndim == 2 else (1, _FRAMES + 2, *size)
    x = session.normal(*shape, width, dtype=dtype).movedim(-1, 1)
    order = torch.channels_last if ndim == 2 else torch.channels_last_3d
    weight = session.normal(width, width, *[3] * ndim, dtype=dtype).contiguous(memory_format=order)
    bias = session.normal(width, dtype=dtype)
    stride, pads = (1,) * ndim, (0, 1, 1)[-ndim:]
    stock = F.conv2d if ndim == 2 else F.conv3d
    dense, dense_weight = x.contiguous(), weight.contiguous()
    calls = {
        _PLAIN: lambda: cudnn.convolve(x, weight, None, stride, pads),
        _STOCK: lambda: stock(dense, dense_weight, bias, stride, pads),
        # Last, so that its first call includes the search but not the loading of libraries.
        _SEARCHED: lambda: cudnn.convolve(x, weight, None, stride, pads),
    }
    pixels = _FRAMES * size[0] * size[1]
    yield from _timed(session, calls, dict.fromkeys(calls, 2 * 3**ndim * width**2 * pixels))


def _upsampling(session: Session, into: int, out: int, size: tuple[int, int]) -> Results:
    conv = UpsampleConv2d(into, out).requires_grad_(False)
    torch.nn.init.normal_(conv.weight)
    torch.nn.init.zeros_(conv.bias)
    conv = conv.to(session.device, session.dtype)
    x = session.normal(1, _FRAMES, *size, into).movedim(-1, 1)
    calls = {kind: functools.partial(run, conv, x) for kind, run in _UPSAMPLE.items()}
    # Four taps for each of four phases, or nine for each pixel.
    grid = _FRAMES * (size[0] + 1) * (size[1] + 1)
    pixels = 4 * _FRAMES * size[0] * size[1]
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
