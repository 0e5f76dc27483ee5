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
| `conv3d` | `conv(x) + bias + residual + residual_bias`; `gamma`: norm and SiLU of it |
| `int8_conv3d` | `conv(x - zero) * scale + bias + residual + residual_bias` with sums in int32 |
"""

# ruff: noqa: F401 (names for other floors)

import torch
from torch import Tensor

from . import checks as check
from . import shapes
from .backends import SIGNATURES, use_backend
from .cache import key_of
from .codes import code_dtype, code_steps, zero_of
from .constraints import dense
from .convolution.fused import Fused
from .convolution.onednn import int8_lacks
from .convolution.weight import ConvWeight, WeightForm
from .devices import (
    GPUS,
    always_searches,
    default_device,
    device_kind,
    device_name,
    has_bfloat16,
    has_own_memory,
    host_bytes,
    lacks,
    memory_bytes,
    release_cached,
    runtime,
    searches_shapes,
    sums_float64,
    synchronize,
    tensor_limit,
    unsearched,
    with_index,
)
from .devices import current as on_device
from .devices.instructions import multiplies_bfloat16, processor, product_dtype, slow_on_cpu
from .dispatch import convolve, run, silu_mul_by_kernel
from .errors import BackendError, first_line, is_out_of_memory, log_once
from .messages import LINE, guarded, line, padded, shown
from .ready.background import DONE, Job, submit, wait
from .ready.background import check as goes_on
from .ready.background import queue_up as queue
from .ready.facts import environment, facts_of, report
from .ready.facts import of_kernels as kernel_facts
from .ready.proof import Proofs, proving
from .ready.seen import Fallback, Snapshot, playing, seeing
from .ready.serving import Prepared, apart, checked_kernels, library_of
from .routes import Route, code_route, conv_route, fp16_pays, route_conditions, table_entry
from .shapes import convolved, new_video
from .support import Support, backend_matrix, gpu_compiler, native_library
from .tensor_files import PICKLE, SAFETENSORS, ZIP, Header, Place, kind_of, read_header
from .warmup_log import Preparation, preparations, preparing


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
    if check.wanted():
        check.norm(x, tail, out, border, codes, saturated, gamma=gamma, bias=bias)
    if out is None:
        out = shapes.new_window(x, tail, border, coded=codes is not None)
    vectors = dense(gamma, x), dense(bias, x)
    codes = dense(codes, x)
    return run("rms_norm_silu", x, *vectors, tail, out, codes, saturated, silu, border)


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
    if check.wanted():
        check.norm(x, tail, out, border, codes, saturated, weight=weight, bias=bias)
        check.divides("groups", groups, x.shape[1])
        wide = torch.promote_types(x.dtype, torch.float32)
        check.fit(x, shapes.statistics(x, groups), (wide,), statistics=statistics)
    if out is None:
        out = shapes.new_window(x, tail, border, coded=codes is not None)
    vectors = dense(weight, x), dense(bias, x)
    ends = tail, out, dense(codes, x), saturated
    return run("group_norm_silu", x, *vectors, statistics, *ends, groups, eps, silu, border)


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
    if check.wanted():
        check.video(x=x)
        check.divides("groups", groups, x.shape[1])
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_empty(shapes.statistics(x, groups), dtype=wide)
    return run("group_norm_statistics", x, out, groups, eps)


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute `x * sigmoid(x) * gate`.

    The gate of SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020). `x` and `gate` can be
    halves of one tensor, the output of a fused projection.

    Args:
        x: `[..., C]`, the last dimension dense.
        gate: Shape and dtype of `x`.
        out: Shape and dtype of `x`; it can be `x` or `gate`.
    """
    if check.wanted():
        check.least("x.ndim", x.ndim, 1)
        check.fit(x, x.shape, check.FLOATS, x=x)
        check.fit(x, x.shape, gate=gate, out=out)
    return run("silu_mul", x, gate, x.new_empty(x.shape) if out is None else out)


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
    if check.wanted():
        check.video(x=x)
        check.vectors(x, x.shape[1], bias=bias, residual_bias=residual_bias)
        check.fit(x, x.shape, residual=residual, out=out)
    out = shapes.new_video(x, x.shape) if out is None else out
    return run("bias_residual", x, dense(bias, x), residual, dense(residual_bias, x), out)


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
    if check.wanted():
        check.fit(q, "BNd", check.FLOATS, q=q)
        check.fit(q, q.shape, k=k, v=v)
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
    if check.wanted():
        check.video(x=x)
        check.divides("phases", phases, x.shape[1])
        check.fit(x, shapes.interleaved(x, phases), out=out)
    out = shapes.new_video(x, shapes.interleaved(x, phases)) if out is None else out
    return run("interleave_time", x, out, phases)


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
    if check.wanted():
        check.video(grid=grid)
        batch, channels, frames, *sides = grid.shape
        check.divides("4 phases", 4, channels)
        check.each("the size of grid", sides, 2, 1)
        check.fit(grid, shapes.merged(grid), out=out)
        check.vectors(grid, channels // 4, bias=bias)
        check.least("times", times, 1)
        if source is not None:
            if frames > 1:
                check.divides("times", times, frames)
            # The only frame is the last of its `times` frames.
            sizes = batch, "C_source", shapes.blocks(frames, times), *(size - 1 for size in sides)
            check.fit(grid, sizes, source=source)
            check.divides("source", source.shape[1], channels * times)
    out = shapes.new_video(grid, shapes.merged(grid)) if out is None else out
    return run("merge_phases", grid, source, dense(bias, grid), out, times)


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
    if check.wanted():
        check.video(x=x)
        check.shuffle(x, size, order)
        if out is not None:
            check.fit(out, shapes.shuffled(x, size), out=out)
    out = shapes.new_video(x, shapes.shuffled(x, size)) if out is None else out
    return run("pixel_shuffle_3d", x, out, tuple(size), order)


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
    if check.wanted():
        check.video(x=x)
        check.least("times", times, 1)
        for length in x.shape[3:]:
            check.divides("size", size, length)
        check.divides("channels", channels, x.shape[1] * times * size * size)
    out = shapes.new_video(x, shapes.averaged(x, channels, times, size))
    return run("average_down", x, out, times, size)


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
    if check.wanted():
        check.video(frames=frames)
        check.shuffle(frames, (1, patch, patch), order)
        if out is None:
            check.one_of("dtype", dtype, check.IMAGES)
        else:
            flat = shapes.images(frames, patch)
            apart = frames.shape[0], frames.shape[2], *flat[1:]
            check.fit(out, apart if out.ndim == 5 else flat, check.IMAGES, out=out)
    if out is None:
        out = frames.new_empty(shapes.images(frames, patch), dtype=dtype)
    return run("frames_to_images", frames, out, patch, order)


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
        weight: `[C_out, C, kt, kh, kw]`, or `[C_out, C, kh, kw]` for each frame on its own; dtype
            of `x`.
        bias: `C_out` values.
        stride: Steps in frames, rows and columns; 1 in frames for each frame on its own.
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
    if check.wanted():
        check.video(x=x)
        shape = check.convolution(x, weight, stride, padding, tail)
        check.vectors(x, weight.shape[0], bias=bias, residual_bias=residual_bias, gamma=gamma)
        check.fit(x, shape, residual=residual, out=out)
    if route is None:
        route = conv_route(weight, stride, video=weight.ndim == 5 or x.shape[2] > 1)
    terms = dense(bias, x), residual, dense(residual_bias, x), dense(gamma, x)
    return convolve(route, x, weight, *terms, tail, out, padding)


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
    if check.wanted():
        check.fit(x, "BCTHW", check.CODES, x=x)
        shape, outputs = check.convolution(x, weight), weight.shape[0]
        check.vectors(x, outputs, scale=scale, bias=bias, residual_bias=residual_bias)
        check.fit(x, shape, (dtype,), residual=residual, out=out)
        check.one_of("dtype", dtype, (torch.int32,) if scale is None else check.FLOATS)
        if scale is None and any(term is not None for term in (bias, residual, residual_bias)):
            raise ValueError("scale is None with other terms; expected the sums alone")
    terms = dense(bias, x), residual, dense(residual_bias, x)
    return run("int8_conv3d", x, weight, dense(scale, x), *terms, out, dtype)
