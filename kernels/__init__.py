"""The ops of the VAEs: formula, shapes and dtypes of each, for callers and for all backends.

Activations are `[B, C, T, H, W]` in channels-last memory, so that each pixel is a row of `C`
adjacent values. Ops support float32, bfloat16, float16, and float64 on the reference; they compute
in float32 or wider and round once, to the dtype of the result. `dispatch.py` selects the backend;
the results of two backends differ by rounding only.

An op returns `out`, or without it a new tensor of that shape (channels-last for a video). It raises
a `ValueError` of one line if shapes, dtypes or devices do not fit, or a tensor requires a gradient
while gradients are enabled, before any work. Vectors of `C` values can have any shape and any float
dtype; None stands for zeros.

| op | formula |
|---|---|
| `rms_norm_silu` | `silu(x / max(norm2(x), 1e-12) * sqrt(C) * gamma)`; SiLU is optional |
| `group_norm_silu` | `silu((x - mean) / sqrt(var + eps) * weight + bias)` per frame and group |
| `group_norm_statistics` | `mean` and `1 / sqrt(var + eps)` of each frame and group |
| `silu_mul` | `x * sigmoid(x) * gate` |
| `bias_residual` | `x + bias + residual + residual_bias` |
| `attention` | `softmax(q k^T / sqrt(d)) v` with memory in O(N) |
| `interleave_time` | frame `phases * t + p` is the p-th part of the channels of frame `t` |
| `merge_phases` | pixel `(2 i + a, 2 j + b)` is part `2 a + b` of window `(i + a, j + b)` |
| `pixel_shuffle_3d` | parts of the channels become frames, rows and columns |
| `average_down` | means of groups of the values in each block of frames and pixels |
| `frames_to_images` | `clamp((x + 1) / 2, 0, 1)` as `[T, H, W, C]`, in float32, uint8 or uint16 |
| `conv2d`, `conv3d` | `conv(x) + bias + residual + residual_bias`; `gamma`: norm and SiLU of it |
| `int8_conv3d` | `conv(x - zero) * scale + bias + residual + residual_bias` with sums in int32 |
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import checks as check
from .backends import use_backend
from .codes import code_dtype, code_steps, zero_of
from .convolution.fused import Fused
from .convolution.onednn import serves as adds_in_place
from .convolution.weight import ConvWeight
from .devices import (
    GPUS,
    default_device,
    device_kind,
    device_name,
    has_bfloat16,
    host_bytes,
    lacks,
    memory_bytes,
    release_cached,
    runtime,
    searches_shapes,
    synchronize,
    tensor_limit,
)
from .devices import current as on_device
from .devices.instructions import multiplies_bfloat16, processor, slow_on_cpu
from .devices.int8 import int8_lacks
from .dispatch import ask, run, run_convolution, run_kernel
from .errors import BackendError, first_line, is_out_of_memory, log_once
from .messages import LINE, guarded, line, padded, shown
from .ready.background import Job, submit, wait
from .ready.facts import facts_of
from .ready.proof import Proofs, proving
from .ready.serving import Prepared, Snapshot, playing, seeing
from .routes import Route, fp16_pays, route_of, table_entry
from .routes import token as route_token
from .shapes import convolved, interleaved, merged, new_video, shuffled
from .tensor_files import PICKLE, SAFETENSORS, ZIP, Header, Place, kind_of, read_header
from .warmup_log import Preparation, preparations, preparing

if TYPE_CHECKING:
    from .support import Support, backend_matrix, gpu_compiler, native_library

__all__ = [
    "GPUS",
    "LINE",
    "PICKLE",
    "SAFETENSORS",
    "ZIP",
    "BackendError",
    "ConvWeight",
    "Fused",
    "Header",
    "Job",
    "Place",
    "Preparation",
    "Prepared",
    "Proofs",
    "Route",
    "Snapshot",
    "Support",
    "adds_in_place",
    "attention",
    "average_down",
    "backend_matrix",
    "bias_residual",
    "code_dtype",
    "code_steps",
    "conv2d",
    "conv3d",
    "conv_route",
    "convolved",
    "default_device",
    "device_kind",
    "device_name",
    "facts_of",
    "first_line",
    "fp16_pays",
    "frames_to_images",
    "gpu_compiler",
    "group_norm_silu",
    "group_norm_statistics",
    "guarded",
    "has_bfloat16",
    "host_bytes",
    "int8_conv3d",
    "int8_lacks",
    "interleave_time",
    "is_capturing",
    "is_out_of_memory",
    "kind_of",
    "lacks",
    "line",
    "log_once",
    "memory_bytes",
    "merge_phases",
    "multiplies_bfloat16",
    "native_library",
    "new_video",
    "on_device",
    "padded",
    "pixel_shuffle_3d",
    "playing",
    "preparations",
    "prepare",
    "preparing",
    "processor",
    "proving",
    "read_header",
    "release_cached",
    "rms_norm_silu",
    "route_token",
    "run_kernel",
    "runtime",
    "searches_shapes",
    "seeing",
    "shown",
    "silu_mul",
    "slow_on_cpu",
    "submit",
    "synchronize",
    "table_entry",
    "tensor_limit",
    "use_backend",
    "wait",
    "zero_of",
]

# Names of `support.py`, which only the command line needs, so ComfyUI starts without it.
_SUPPORT = ("Support", "backend_matrix", "gpu_compiler", "native_library")


def __getattr__(name: str) -> Any:  # noqa: ANN401, a class or a function
    """Return the `name` of `support.py`."""
    if name in _SUPPORT:
        return getattr(importlib.import_module(".support", __name__), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")


def rms_norm_silu(
    x: Tensor,
    gamma: Tensor,
    *,
    silu: bool = True,
    bias: Tensor | None = None,
    tail: Tensor | None = None,
    out: Tensor | None = None,
    border: int = 0,
    codes: Tensor | None = None,
    saturated: Tensor | None = None,
) -> Tensor:
    """Normalise each pixel over its channels, scale, and apply SiLU.

    `silu(x / max(norm2(x), 1e-12) * sqrt(C) * gamma)`: `RMS_norm` of Wan 2.1, wan/modules/vae.py,
    which has no mean and no bias, followed by its SiLU. With `tail` the result is the input of a
    causal convolution, written in the same pass: the tail, then the new frames.

    With `codes` the result is in the 8 bits that `int8_conv3d` reads: `clamp(round(y * codes) + 17,
    0, 255)` in uint8, and the same less 128 in int8 (see `codes.py`). Tail and border are codes
    too, and NaN has the code of 0.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        gamma: `C` scales.
        silu: Apply SiLU after the norm.
        bias: `C` values, added to `x` first in float32: the bias of the convolution before.
        tail: `[B, C, K, H, W]`, channels-last, dtype of `x`: the results for the `K` frames before
            `x`. It is overwritten with the last `K` frames of the result.
        out: `[B, C, K + T, H + 2 * border, W + 2 * border]` (`K` is 0 without `tail`),
            channels-last, dtype of `x`. It can be a slice of frames of a longer buffer, and `x`
            itself without `tail` and `border`.
        border: Pixels of zeros around each frame of the result, where a convolution does not pad.
        codes: `[C]`, float32: codes per unit of each channel. `out` and `tail` are int8 or uint8;
            a new result is uint8 on a CPU, elsewhere int8. None: no codes.
        saturated: `[2]`, int64, given with `codes`: the number of values outside of the codes is
            added to the first, and that of NaN to the second.
    """
    check.video(x=x)
    check.vectors(x, x.shape[1], gamma=gamma, bias=bias)
    check.window(x, tail, out, border, codes, saturated)
    options = {"silu": silu, "bias": bias, "tail": tail, "out": out, "border": border}
    if codes is not None:
        options |= {"codes": codes, "saturated": saturated}
    return run("rms_norm_silu", x, gamma, **options)


def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    *,
    eps: float = 1e-6,
    silu: bool = True,
    statistics: Tensor | None = None,
    tail: Tensor | None = None,
    out: Tensor | None = None,
    border: int = 0,
    codes: Tensor | None = None,
    saturated: Tensor | None = None,
) -> Tensor:
    """Normalise each frame over its pixels and each group of channels, and apply SiLU.

    `silu((x - mean) / sqrt(var + eps) * weight + bias)` with the statistics of one frame and group
    and the biased variance: `GroupNorm` of a single frame, as in SeedVR2
    (models/video_vae_v3/modules/causal_inflation_lib.py, causal_norm_wrapper).

    With `statistics`, `x` can be a band of rows of the frames that were measured: a view
    `video[..., top:bottom, :]`. `tail` and `out` are bands too. The bands together equal the result
    for whole frames; with `border` each band has its own.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        weight: `C` scales.
        bias: `C` offsets.
        groups: Number of groups; a divisor of `C`.
        eps: Added to the variance; unused with `statistics`.
        silu: Apply SiLU after the norm.
        statistics: `[B, T, 2, groups]`, float32 (float64 for float64), from
            `group_norm_statistics`; None: measured from `x`.
        tail: `[B, C, K, H, W]`, as for `rms_norm_silu`, and so are the next four.
        out: `[B, C, K + T, H + 2 * border, W + 2 * border]`.
        border: Pixels of zeros around each frame of the result.
        codes: `[C]`, float32, or None.
        saturated: `[2]`, int64, given with `codes`.
    """
    check.video(x=x)
    check.vectors(x, x.shape[1], weight=weight, bias=bias)
    check.divides(groups, x.shape[1], "groups")
    check.statistics(x, groups, statistics)
    check.window(x, tail, out, border, codes, saturated)
    options = {} if codes is None else {"codes": codes, "saturated": saturated}
    return run(
        "group_norm_silu", x, weight, bias, groups, eps=eps, silu=silu, statistics=statistics,
        tail=tail, out=out, border=border, **options,
    )  # fmt: skip


def group_norm_statistics(x: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """Measure each frame over its pixels and each group of channels, for `group_norm_silu`.

    `mean` and `1 / sqrt(var + eps)` with the biased variance of a frame and group. A mean that is
    large against the deviation does not reduce the precision of the variance. The result is
    deterministic, and bit-identical to the statistics that `group_norm_silu` uses without any, if
    the same backend runs both.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        groups: Number of groups; a divisor of `C`.
        eps: Added to the variance.

    Returns:
        `[B, T, 2, groups]`, dense, float32 (float64 for float64): the means first. NaN for a frame
        without pixels.
    """
    check.video(x=x)
    check.divides(groups, x.shape[1], "groups")
    return run("group_norm_statistics", x, groups, eps)


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute `x * sigmoid(x) * gate`.

    The gate of SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020). `x` and `gate` can be
    halves of one tensor, the output of a fused projection.

    Args:
        x: `[..., C]`, the last dimension dense.
        gate: Shape and dtype of `x`.
        out: Shape and dtype of `x`; it can be `x` or `gate`.
    """
    check.floats(x=x)
    if x.ndim == 0:
        raise ValueError("x has 0 dimensions; expected [..., C]")
    check.results(x, tuple(x.shape), gate=gate, out=out)
    return run("silu_mul", x, gate, out=out)


def bias_residual(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add biases and residual to the output of a convolution in one pass.

    `x + bias + residual + residual_bias`, added from left to right in float32: the bias of a
    convolution, its shortcut, and the bias of the shortcut's convolution.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        bias: `C` values.
        residual: Shape and dtype of `x`; None: zeros.
        residual_bias: `C` values.
        out: Shape and dtype of `x`; it can be `x` or `residual`.
    """
    check.video(x=x)
    check.vectors(x, x.shape[1], bias=bias, residual_bias=residual_bias)
    check.results(x, tuple(x.shape), residual=residual, out=out)
    return run("bias_residual", x, bias, residual, residual_bias, out=out)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute single-head attention over the pixels of a frame: `softmax(q k^T / sqrt(d)) v`.

    Memory grows with N: the `N x N` scores of a 3840 x 2160 picture would take 67 GB.

    Args:
        q: `[B, N, d]`, the last dimension dense.
        k: As `q`.
        v: As `q`.

    Returns:
        `[B, N, d]`.
    """
    check.floats(q=q)
    check.attention(q, k, v)
    return run("attention", q, k, v)


def interleave_time(x: Tensor, phases: int, *, out: Tensor | None = None) -> Tensor:
    """Move temporal phases from the channels to frames.

    Frame `phases * t + p` of the result is channels `[p * C, (p + 1) * C)` of frame `t`: the
    reshape after `time_conv` in Wan's `Resample`, wan/modules/vae.py.

    Args:
        x: `[B, phases * C, T, H, W]`, channels-last.
        phases: Result frames per frame of `x`.
        out: `[B, C, phases * T, H, W]`, channels-last, dtype of `x`.
    """
    check.video(x=x)
    check.divides(phases, x.shape[1], "phases")
    check.results(x, interleaved(x, phases), out=out)
    return run("interleave_time", x, phases, out=out)


def merge_phases(
    grid: Tensor,
    source: Tensor | None = None,
    times: int = 1,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Merge the four phases of a folded upsampling convolution into a picture of twice the size.

    Nearest 2x followed by a 3x3 convolution equals a 2x2 convolution of the small picture for each
    of the four phases of the large one. A grid of `(H + 1) x (W + 1)` windows holds all phases.
    Pixel `(2 i + a, 2 j + b)` is phase `2 a + b` of the window at `(i + a, j + b)`.

    With `source`, channel `c` of that pixel in frame `times * t + p` gets one more term: channel
    `((c * times + p) * 4 + 2 a + b) * C_source // (4 * times * C)` of `source` at frame `t` and
    pixel `(i, j)`. This is `DupUp3D` of Wan 2.2, wan/modules/vae2_2.py, which repeats channels and
    spreads them over the new pixels.

    Args:
        grid: `[B, 4 * C, T, H + 1, W + 1]`, channels-last; channel `(2 a + b) * C + c`.
        source: `[B, C_source, T / times, H, W]`. For the first frame of a video, `[B, C_source, 1,
            H, W]` with `T` = 1: it is the last of the `times` frames.
        times: Result frames per frame of `source`.
        bias: `C` values, added to every pixel before `source`.
        out: `[B, C, T, 2 H, 2 W]`, channels-last, dtype of `grid`.
    """
    check.video(grid=grid)
    check.divides(4, grid.shape[1], "4 phases")
    if 0 in grid.shape[3:]:
        raise ValueError(f"grid is {list(grid.shape)}; expected one row and column at least")
    check.results(grid, merged(grid), out=out)
    check.phase_source(grid, source, times)
    check.vectors(grid, grid.shape[1] // 4, bias=bias)
    return run("merge_phases", grid, source, times, bias=bias, out=out)


def pixel_shuffle_3d(
    x: Tensor, size: tuple[int, int, int], order: str = "cthw", *, out: Tensor | None = None
) -> Tensor:
    """Move parts of the channels to frames, rows and columns.

    The channels of `x` are four nested indices: `c` of the result's channels, and `t`, `h`, `w`
    within a block of frames, rows and columns. `order` names them from the slowest to the fastest.
    "cthw" with one frame is `torch.nn.PixelShuffle`; "ctwh" is the patch order of Wan 2.2
    (unpatchify, wan/modules/vae2_2.py); "hwtc" is the upsampling of SeedVR2.

    Args:
        x: `[B, C * t * h * w, T, H, W]`, channels-last.
        size: `t`, `h` and `w`.
        order: The letters c, t, h, w in any order.
        out: `[B, C, t * T, h * H, w * W]`, any device, dtype and strides.

    Returns:
        `out`, or a new channels-last tensor of that shape and the dtype of `x`.
    """
    check.video(x=x)
    check.shuffle(x, size, order)
    check.target(out, shuffled(x, size))
    return run("pixel_shuffle_3d", x, size, order, out=out)


def average_down(x: Tensor, channels: int, *, times: int, size: int) -> Tensor:
    """Average blocks of frames, pixels and channels to a smaller video.

    The frames and pixels of each `times x size x size` block become channels, the finest last, and
    adjacent channels are averaged in groups: `AvgDown3D` of Wan 2.2, wan/modules/vae2_2.py. Frames
    missing at the start of the video count as zeros.

    Args:
        x: `[B, C, T, H, W]`, channels-last; `H` and `W` are multiples of `size`.
        channels: Channels of the result; a divisor of `C * times * size * size`.
        times: Frames per block.
        size: Rows and columns per block.

    Returns:
        `[B, channels, ceil(T / times), H / size, W / size]`, channels-last, in new memory.
    """
    check.video(x=x)
    check.averages(x, channels, times, size)
    return run("average_down", x, channels, times=times, size=size)


def frames_to_images(
    frames: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    patch: int = 1,
    order: str = "cthw",
    out: Tensor | None = None,
) -> Tensor:
    """Convert decoded frames to images: `clamp((x + 1) / 2, 0, 1)`, channels last, in one pass.

    In uint8 a value is `floor(255 * image)`, because ComfyUI's saver truncates too. In uint16 it is
    `round(65535 * image)`, to nearest and half to even. NaN stays NaN, and is 0 in integers.
    All arithmetic is float32.

    Args:
        frames: `[B, C, T, H, W]` in about [-1, 1], channels-last; `[B, C * patch^2, T, H / patch, W
            / patch]` with pixels in the channels.
        dtype: Dtype of a new result: a float dtype, uint8 or uint16.
        patch: Rows and columns of pixels in the channels.
        order: Their order, as for `pixel_shuffle_3d`.
        out: `[B * T, H, W, C]` or `[B, T, H, W, C]`, a float dtype, uint8 or uint16, any device and
            strides.

    Returns:
        `out`, or a new dense tensor `[B * T, H, W, C]` on the device of `frames`.
    """
    check.video(frames=frames)
    check.shuffle(frames, (1, patch, patch), order)
    check.images(frames, dtype, patch, out)
    options = {"dtype": dtype, "patch": patch, "order": order, "out": out}
    return run("frames_to_images", frames, **options)


def conv3d(
    x: Tensor,
    weight: Tensor | ConvWeight,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, int, int] = (1, 1, 1),
    padding: tuple[int, int] = (0, 0),
    tail: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    gamma: Tensor | None = None,
    out: Tensor | None = None,
    route: Route | None = None,
) -> Tensor:
    """Convolve the frames of `tail`, followed by those of `x`, without padding in time.

    The cross-correlation of `torch.nn.functional.conv3d`, then `+ bias + residual + residual_bias`.
    With `gamma` the result is `rms_norm_silu` of that sum, as the next convolution reads it.
    Products are summed in float32, or in float16 where the error stays below that of bfloat16.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        weight: `[C_out, C, kt, kh, kw]`, dtype of `x`.
        bias: `C_out` values.
        stride: Steps in frames, rows and columns.
        padding: Rows and columns of zeros around each frame, on both sides. 0 for frames that have
            a border already.
        tail: `[B, C, K, H, W]`, channels-last, dtype of `x`: the frames before `x`; it is only
            read. None: there are none.
        residual: `[B, C_out, T', H', W']`, channels-last, dtype of `x`; None: zeros.
        residual_bias: `C_out` values.
        gamma: `C_out` scales of the norm; None: no norm, no SiLU.
        out: `[B, C_out, T', H', W']`, channels-last, dtype of `x`. It can be a slice of frames of a
            longer buffer, and `residual` itself.
        route: The route of the layer, see `conv_route`; None: it is found for this call.

    Returns:
        `out`, or a new tensor of its shape, `T' = (K + T - kt) / stride + 1` rounded down.
    """
    weight = ConvWeight.of(weight)
    check.video(x=x)
    shape = check.convolution(x, weight, stride, padding, tail)
    check.vectors(x, weight.shape[0], bias=bias, residual_bias=residual_bias, gamma=gamma)
    check.results(x, shape, residual=residual, out=out)
    return run_convolution(
        "conv3d", route, x, weight, bias, stride=stride, padding=padding, tail=tail,
        residual=residual, residual_bias=residual_bias, gamma=gamma, out=out,
    )  # fmt: skip


def conv2d(
    x: Tensor,
    weight: Tensor | ConvWeight,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    gamma: Tensor | None = None,
    out: Tensor | None = None,
    route: Route | None = None,
) -> Tensor:
    """Convolve each frame on its own, otherwise as `conv3d`.

    Args:
        x: `[N, C, H, W]`, channels-last.
        weight: `[C_out, C, kh, kw]`, dtype of `x`.
        bias: `C_out` values.
        stride: Steps in rows and columns.
        padding: Rows and columns of zeros around each frame, on both sides.
        residual: `[N, C_out, H', W']`, channels-last, dtype of `x`, or None. If it is videos of one
            frame, `[N, C_out, 1, H', W']`, so are `out` and the result.
        residual_bias: `C_out` values.
        gamma: `C_out` scales, or None.
        out: `[N, C_out, H', W']`, channels-last, dtype of `x`; it can be `residual` itself.
        route: The route of the layer; None: it is found for this call.
    """
    weight = ConvWeight.of(weight)
    check.frames(x=x)
    shape = check.convolution(x, weight, stride, padding)
    check.vectors(x, weight.shape[0], bias=bias, residual_bias=residual_bias, gamma=gamma)
    if residual is not None and residual.ndim == 5:
        shape = *shape[:2], 1, *shape[2:]
    check.results(x, shape, residual=residual, out=out)
    return run_convolution(
        "conv2d", route, x, weight, bias, stride=stride, padding=padding, residual=residual,
        residual_bias=residual_bias, gamma=gamma, out=out,
    )  # fmt: skip


def int8_conv3d(
    x: Tensor,
    weight: Tensor | ConvWeight,
    scale: Tensor | None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve codes with int8 weights, without padding in space or time.

    `sum((x - zero) * weight) * scale + bias + residual + residual_bias`, where `zero` is the code
    of 0 in the dtype of `x` (see `codes.py`). The sums are exact, in int32; the terms are added
    from left to right in float32, and the result is rounded once.

    Args:
        x: `[B, C, T, H, W]`, channels-last, int8 or uint8, with the earlier frames and with a
            border of codes of 0.
        weight: `[C_out, C, kt, kh, kw]`, int8.
        scale: `C_out` factors of the sums; None: the result is the sums, in int32.
        bias: `C_out` values.
        residual: `[B, C_out, T', H', W']`, channels-last, in `dtype`; None: zeros.
        residual_bias: `C_out` values.
        dtype: Dtype of the result.
        out: `[B, C_out, T', H', W']`, channels-last, in `dtype`; it can be `residual` itself.

    Returns:
        `out`, or a new tensor of its shape; `T' = T - kt + 1`, and so are `H'` and `W'`.
    """
    weight = ConvWeight.of(weight)
    terms = {"bias": bias, "residual": residual, "residual_bias": residual_bias, "out": out}
    check.code_convolution(x, weight, scale, dtype, **terms)
    return run("int8_conv3d", x, weight, scale, dtype=dtype, **terms)


def conv_route(
    x: Tensor,
    weight: Tensor | ConvWeight,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, int],
    norm: bool = False,
) -> Route:
    """Return what runs such convolutions, and what it does without another pass.

    It decides the cheapest layout of the caller's memory. Every layout gives the same result. It
    holds as long as `route_token` is the same.

    Args:
        x: `[B, C, T, H, W]` or `[N, C, H, W]`, channels-last: the frames of a call without those
            before them. Only its shape, dtype and device matter.
        weight: `[C_out, C, ...]`, as for the call.
        stride: As for the call.
        padding: As for the call.
        norm: The call has a `gamma`.
    """
    return route_of(x, ConvWeight.of(weight), stride, padding, norm=norm)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is captured on `device`: no free is possible then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def prepare(device: torch.device, record: Callable[[], object]) -> Prepared:
    """Let the background thread build what a network needs, and return what a video may use.

    Args:
        device: The device.
        record: Runs the network once on `meta`, with all of its ops and sizes.
    """
    return Prepared(ask, device, record)
