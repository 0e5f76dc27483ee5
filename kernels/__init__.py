"""The ops of the VAEs, stated once: formula, shapes and dtypes. This page is the contract.

Activations are `[B, C, T, H, W]` in channels-last memory, so that every pixel is a row of `C`
neighbouring numbers. Each op takes float32, bfloat16, float16 (and float64 where the reference
serves), computes in float32 at least and rounds once, to the dtype of its result. Which backend
does it is decided in `dispatch.py`; the results of two backends differ by rounding alone.

An op returns `out`, or a new tensor (channels-last for a video) where there is none. It raises a
`ValueError` of one line where shapes, dtypes or devices do not fit, before any work.

| op | formula |
|---|---|
| `rms_norm_silu` | `silu(x / max(norm2(x), 1e-12) * sqrt(C) * gamma)`; SiLU is optional |
| `group_norm_silu` | `silu((x - mean) / sqrt(var + eps) * weight + bias)` per frame and group |
| `group_norm_statistics` | `mean` and `1 / sqrt(var + eps)` of each frame and group |
| `silu_mul` | `x * sigmoid(x) * gate` |
| `bias_residual` | `x + bias + residual + residual_bias` |
| `attention` | `softmax(q k^T / sqrt(d)) v` in memory that grows with N, never with N x N |
| `interleave_time` | frame `phases * t + p` is the p-th part of the channels of frame `t` |
| `merge_phases` | pixel `(2 i + a, 2 j + b)` is part `2 a + b` of window `(i + a, j + b)` |
| `pixel_shuffle_3d` | parts of the channels become frames, rows and columns |
| `average_down` | means of groups of the numbers in each block of frames and pixels |
| `frames_to_images` | `clamp((x + 1) / 2, 0, 1)` as `[T, H, W, C]`, in float32 or in 8 bits |
"""

import torch
from torch import Tensor

from . import checks as check
from .backends import use_backend
from .dispatch import run, run_kernel
from .errors import BackendError, is_out_of_memory, log_once
from .gpu_config import GPUConfig, gpu_config
from .measure import synchronize
from .messages import LINE, guarded, line, padded, shown
from .shapes import interleaved, merged, new_video, shuffled
from .support import NativeLibrary, Support, backend_matrix, native_library
from .tensor_files import PICKLE, SAFETENSORS, ZIP, Header, Place, kind_of, read_header
from .warmup_log import Preparation, preparations, preparing

__all__ = [
    "LINE",
    "PICKLE",
    "SAFETENSORS",
    "ZIP",
    "BackendError",
    "GPUConfig",
    "Header",
    "NativeLibrary",
    "Place",
    "Preparation",
    "Support",
    "attention",
    "average_down",
    "backend_matrix",
    "bias_residual",
    "frames_to_images",
    "gpu_config",
    "group_norm_silu",
    "group_norm_statistics",
    "guarded",
    "interleave_time",
    "is_out_of_memory",
    "kind_of",
    "line",
    "log_once",
    "merge_phases",
    "native_library",
    "new_video",
    "padded",
    "pixel_shuffle_3d",
    "preparations",
    "preparing",
    "read_header",
    "rms_norm_silu",
    "run_kernel",
    "shown",
    "silu_mul",
    "synchronize",
    "use_backend",
]


def rms_norm_silu(
    x: Tensor,
    gamma: Tensor,
    *,
    silu: bool = True,
    bias: Tensor | None = None,
    tail: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise each pixel over its channels, scale, and apply SiLU.

    `silu(x / max(norm2(x), 1e-12) * sqrt(C) * gamma)`: `RMS_norm` of Wan 2.1, wan/modules/vae.py,
    which has no mean and no bias, followed by its SiLU. `bias` is added to `x` before all that: it
    is what the convolution that made `x` has left out.

    With `tail` this is the input of a causal convolution, made in the same pass: the frames that
    the convolution saw last, then the new ones; and the last of both become the next tail.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        gamma: `C` scales, in any shape and float dtype.
        silu: Apply SiLU after the norm.
        bias: `C` numbers, in any shape and float dtype, added to `x` in float32; None: zeros.
        tail: `[B, C, K, H, W]`, channels-last, of the dtype of `x`: the results of the `K` frames
            before `x`. It is overwritten with the last `K` frames of the result.
        out: `[B, C, K + T, H, W]` (`K` is 0 without `tail`), channels-last, of the dtype of `x`; it
            may be a run of frames of a longer buffer, and `x` itself without `tail`.
    """
    check.video(x=x)
    check.vectors(x, x.shape[1], gamma=gamma, bias=bias)
    check.window(x, tail, out)
    return run("rms_norm_silu", x, gamma, silu=silu, bias=bias, tail=tail, out=out)


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
) -> Tensor:
    """Normalise each frame over its pixels and each group of channels, and apply SiLU.

    `silu((x - mean) / sqrt(var + eps) * weight + bias)` with the statistics of one frame and group,
    the variance over all of it: `GroupNorm` of a single frame, as in SeedVR2
    (models/video_vae_v3/modules/causal_inflation_lib.py, causal_norm_wrapper). `tail` and `out` are
    those of `rms_norm_silu`.

    With `statistics` nothing is measured, and `x` may be a band of rows of the frames that they are
    of: a view `video[..., top:bottom, :]`, as `tail` and `out` may be of theirs. Bands with the
    statistics of the whole are the whole.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        weight: `C` scales.
        bias: `C` offsets.
        groups: Groups; a divisor of `C`.
        eps: Added to the variance; of no use with `statistics`.
        silu: Apply SiLU after the norm.
        statistics: `[B, T, 2, groups]`, float32 (float64 for float64): those of
            `group_norm_statistics`; None: those of `x`.
        tail: `[B, C, K, H, W]`, channels-last, of the dtype of `x`: the results of the `K` frames
            before `x`. It is overwritten with the last `K` frames of the result.
        out: `[B, C, K + T, H, W]`, channels-last, of the dtype of `x`.
    """
    check.video(x=x)
    check.vectors(x, x.shape[1], weight=weight, bias=bias)
    check.divides(groups, x.shape[1], "groups")
    check.statistics(x, groups, statistics)
    check.window(x, tail, out)
    options = {"eps": eps, "silu": silu, "statistics": statistics, "tail": tail, "out": out}
    return run("group_norm_silu", x, weight, bias, groups, **options)


def group_norm_statistics(x: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """Measure each frame over its pixels and each group of channels, for `group_norm_silu`.

    `mean` and `1 / sqrt(var + eps)`, the variance over all of a frame and group. Numbers far from
    zero beside their deviation cost no digits of it. The same `x` has the same statistics each
    time, and `group_norm_silu` without any has these, bit for bit, if the same backend serves both.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        groups: Groups; a divisor of `C`.
        eps: Added to the variance.

    Returns:
        `[B, T, 2, groups]`, dense, float32 (float64 for float64): first the means. NaN where a
        frame has no pixels.
    """
    check.video(x=x)
    check.divides(groups, x.shape[1], "groups")
    return run("group_norm_statistics", x, groups, eps)


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """SiLU of one tensor times another: `x * sigmoid(x) * gate`.

    The gate of SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020). The two may be halves
    of one tensor, as a fused projection makes them.

    Args:
        x: `[..., C]`, its last dimension dense.
        gate: Of the shape and dtype of `x`.
        out: Likewise; it may be `x` or `gate`.
    """
    check.floats(x=x)
    if x.ndim == 0:
        raise ValueError("x has no dimension; expected [..., C]")
    check.like(x, gate=gate, out=out)
    return run("silu_mul", x, gate, out=out)


def bias_residual(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add what a convolution without bias leaves to add, in one pass.

    `x + bias + residual + residual_bias`, added from left to right in float32: the biases of a
    convolution and of the shortcut beside it, and the shortcut.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        bias: `C` numbers, in any shape and float dtype; None: zeros.
        residual: Of the shape and dtype of `x`; None: zeros.
        residual_bias: As `bias`.
        out: Of the shape and dtype of `x`; it may be `x` or `residual`.
    """
    check.video(x=x)
    check.vectors(x, x.shape[1], bias=bias, residual_bias=residual_bias)
    check.like(x, residual=residual, out=out)
    return run("bias_residual", x, bias, residual, residual_bias, out=out)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Single-head attention over the pixels of a frame: `softmax(q k^T / sqrt(d)) v`.

    Its memory grows with N: the `N x N` scores of a 3840 x 2160 picture would take 67 GB.

    Args:
        q: `[B, N, d]`, its last dimension dense.
        k: Like `q`.
        v: Like `q`.

    Returns:
        `[B, N, d]`.
    """
    check.floats(q=q)
    check.like(q, k=k, v=v)
    return run("attention", q, k, v)


def interleave_time(x: Tensor, phases: int, *, out: Tensor | None = None) -> Tensor:
    """Spread the temporal phases in the channels over frames.

    Frame `phases * t + p` of the result is channels `[p * C, (p + 1) * C)` of frame `t`: the
    reshape after `time_conv` in Wan's `Resample`, wan/modules/vae.py.

    Args:
        x: `[B, phases * C, T, H, W]`, channels-last.
        phases: Frames made from each frame.
        out: `[B, C, phases * T, H, W]`, channels-last, of the same dtype.
    """
    check.video(x=x)
    check.divides(phases, x.shape[1], "phases")
    check.result(x, out, interleaved(x, phases))
    return run("interleave_time", x, phases, out=out)


def merge_phases(
    grid: Tensor,
    source: Tensor | None = None,
    times: int = 1,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Merge the four phases of a folded upsampling convolution into one picture of twice the size.

    Nearest 2x and then a 3x3 convolution is a 2x2 convolution of the small picture for each of the
    four phases of the large one; a grid of `(H + 1) x (W + 1)` windows has them all. Pixel
    `(2 i + a, 2 j + b)` is phase `2 a + b` of the window at `(i + a, j + b)`.

    With `source` every pixel also gets one of its numbers: that of channel
    `((c * times + p) * 4 + 2 a + b) * C_source // (4 * times * C)`, from frame `t` and pixel
    `(i, j)`, for channel `c` of frame `times * t + p`. That is `DupUp3D` of Wan 2.2,
    wan/modules/vae2_2.py, which repeats the channels and spreads them over the new pixels.

    Args:
        grid: `[B, 4 * C, T, H + 1, W + 1]`, channels-last; channel `(2 a + b) * C + c`.
        source: `[B, C_source, T / times, H, W]`. For the first frame of a video, `[B, C_source, 1,
            H, W]` where `T` is 1: it is the last of the `times` frames.
        times: Frames of the result for each of `source`.
        bias: `C` numbers, in any shape and float dtype, added to every pixel before `source`; None:
            zeros.
        out: `[B, C, T, 2 H, 2 W]`, channels-last, of the dtype of `grid`.
    """
    check.video(grid=grid)
    check.divides(4, grid.shape[1], "4 phases")
    if 0 in grid.shape[3:]:
        raise ValueError(f"grid is {list(grid.shape)}; expected one row and column at least")
    check.result(grid, out, merged(grid))
    check.phase_source(grid, source, times)
    check.vectors(grid, grid.shape[1] // 4, bias=bias)
    return run("merge_phases", grid, source, times, bias=bias, out=out)


def pixel_shuffle_3d(
    x: Tensor, size: tuple[int, int, int], order: str = "cthw", *, out: Tensor | None = None
) -> Tensor:
    """Turn parts of the channels into frames, rows and columns.

    The channels of `x` are four nested indices, `c` of the result's channels and `t`, `h`, `w`
    inside of a block of frames, rows and columns; `order` names them from the slowest to the
    fastest. "cthw" with one frame is `torch.nn.PixelShuffle`; "ctwh" are the patches of Wan 2.2
    (unpatchify, wan/modules/vae2_2.py); "hwtc" is the upsampling of SeedVR2.

    Args:
        x: `[B, C * t * h * w, T, H, W]`, channels-last.
        size: `t`, `h` and `w`.
        order: The letters c, t, h, w in some order.
        out: `[B, C, t * T, h * H, w * W]`, on any device, of any dtype and strides.

    Returns:
        `out`, or a new channels-last tensor of that shape and the dtype of `x`.
    """
    check.video(x=x)
    check.shuffle(x, size, order)
    check.target(out, shuffled(x, size))
    return run("pixel_shuffle_3d", x, size, order, out=out)


def average_down(x: Tensor, channels: int, *, times: int, size: int) -> Tensor:
    """Average what falls on one number of a smaller video.

    The frames and pixels of each `times x size x size` block become channels, the finest last, and
    neighbouring channels are averaged in groups: `AvgDown3D` of Wan 2.2, wan/modules/vae2_2.py.
    Frames that lack at the start of the video are zeros.

    Args:
        x: `[B, C, T, H, W]`, channels-last; `H` and `W` are multiples of `size`.
        channels: Of the result; they divide `C * times * size * size`.
        times: Frames that become one.
        size: Pixels that become one, in height and in width.

    Returns:
        `[B, channels, ceil(T / times), H / size, W / size]`, channels-last, in memory of its own.
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
    """Turn decoded frames into images: `clamp((x + 1) / 2, 0, 1)`, pixels last, in one pass.

    In 8 bits a number is `floor(255 * image)`: ComfyUI's saver drops the fraction. NaN stays NaN,
    and is 0 in 8 bits. The arithmetic is float32 whatever the dtypes.

    Args:
        frames: `[B, C, T, H, W]` in about [-1, 1], channels-last; `[B, C * patch^2, T, H / patch,
            W / patch]` where pixels lie in channels.
        dtype: Of a new result: float32, another float dtype or uint8.
        patch: Rows and columns of pixels that lie in the channels.
        order: How they lie there, as for `pixel_shuffle_3d`.
        out: `[B * T, H, W, C]` or `[B, T, H, W, C]`, of such a dtype, on any device, of any
            strides.

    Returns:
        `out`, or a new dense tensor `[B * T, H, W, C]` on the device of `frames`.
    """
    check.video(frames=frames)
    check.shuffle(frames, (1, patch, patch), order)
    check.images(frames, dtype, patch, out)
    return run("frames_to_images", frames, dtype=dtype, patch=patch, order=order, out=out)
