"""Every op in plain PyTorch: oracle of the faster backends, and their stand-in.

The ops walk over blocks of rows that fit a core's cache, so that the passes of a formula meet in
the cache and not in memory; and they write into the caller's buffer, because fresh pages cost as
much as the arithmetic.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements per block: 4 MB of float32. Between 0.4 M and 1.6 M it makes no difference; small blocks
# cost calls, and the whole tensor costs fresh pages (19 ms against 2.3 ms for [32768, 192]; two
# cores of a Zen 5 server, 2026-11).
_BLOCK_ELEMENTS = 1_000_000

# Largest score matrix, in elements, that attention without a fused kernel may hold at a time.
_SCORE_ELEMENTS = 1 << 25

# `torch.nn.functional.normalize` divides by max(norm, eps) with this eps; Wan's RMS_norm is built
# on it.
_NORM_EPS = 1e-12


def rms_norm_silu(
    x: Tensor, gamma: Tensor, *, silu: bool = True, out: Tensor | None = None
) -> Tensor:
    """Normalise each pixel over its channels, scale, and apply SiLU.

    `silu(x / max(norm2(x), 1e-12) * sqrt(C) * gamma)`: `RMS_norm` of Wan 2.1, wan/modules/vae.py,
    which has no mean and no bias, followed by its SiLU.

    Args:
        x: `[B, C, T, H, W]`, channels-last.
        gamma: `C` scales, in any shape.
        silu: Apply SiLU after the norm.
        out: `[B, C, T, H, W]`, channels-last, of the same dtype; it may be a run of frames of a
            longer buffer.

    Returns:
        `out`, or a new tensor like `x`.
    """
    scale = gamma.flatten().float() * math.sqrt(x.shape[1])
    if torch.is_grad_enabled() and (x.requires_grad or gamma.requires_grad):
        y = F.normalize(x.float(), dim=1, eps=_NORM_EPS) * scale.view(1, -1, *[1] * (x.ndim - 2))
        y = (F.silu(y) if silu else y).to(x.dtype)
        return y if out is None else out.copy_(y)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.preserve_format)
    if x.dtype == torch.float32:
        for rows, target in _blocks(x, out):
            torch.mul(rows, _inverse_norm(rows), out=target).mul_(scale)
            if silu:
                F.silu(target, inplace=True)
        return out
    scratch: Tensor | None = None
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    for rows, target in _blocks(x, out):
        if scratch is None:
            scratch = torch.empty(rows.shape, dtype=wide, device=x.device)
        work = scratch[: rows.shape[0]].copy_(rows)
        work.mul_(_inverse_norm(work)).mul_(scale)
        if silu:
            F.silu(work, inplace=True)
        target.copy_(work)
    return out


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Single-head attention over the pixels of a frame: `softmax(q k^T / sqrt(d)) v`.

    PyTorch's fused kernels need memory for the result alone, whatever the head size: the flash
    kernel of a CPU, and on CUDA the memory-efficient one. Elsewhere the queries go through in
    blocks. The `N x N` scores of a 3840 x 2160 picture would take 67 GB.

    Args:
        q: `[B, N, d]`, its last dimension dense.
        k: Like `q`.
        v: Like `q`.

    Returns:
        `[B, N, d]`.
    """
    if _fused_attention_takes(q, k, v):
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
    rows = max(1, _SCORE_ELEMENTS // k.shape[1])
    keys = k.transpose(1, 2)
    parts = []
    for part in q.split(rows, dim=1):
        scores = torch.matmul(part * q.shape[-1] ** -0.5, keys)
        parts.append(torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v))
    return torch.cat(parts, dim=1)


def interleave_time(x: Tensor, phases: int, *, out: Tensor | None = None) -> Tensor:
    """Spread the temporal phases in the channels over frames.

    Frame `phases * t + p` of the result is channels `[p * C, (p + 1) * C)` of frame `t`: the
    reshape after `time_conv` in Wan's `Resample`, wan/modules/vae.py.

    Args:
        x: `[B, phases * C, T, H, W]`, channels-last.
        phases: Frames made from each frame.
        out: `[B, C, phases * T, H, W]`, channels-last, of the same dtype.

    Returns:
        `out`, or a new channels-last tensor of that shape.
    """
    batch, channels, frames, height, width = x.shape
    channels //= phases
    if out is None:
        out = _channels_last(x, batch, channels, phases * frames, height, width)
    # [B, T, H, W, phase, C] -> [B, T, phase, H, W, C]
    source = x.movedim(1, -1).unflatten(4, (phases, channels)).permute(0, 1, 4, 2, 3, 5)
    out.movedim(1, -1).view(source.shape).copy_(source)
    return out


def merge_phases(grid: Tensor, source: Tensor | None = None, times: int = 1) -> Tensor:
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

    Returns:
        `[B, C, T, 2 H, 2 W]`, channels-last.
    """
    batch, channels, frames, height, width = grid.shape
    channels, height, width = channels // 4, height - 1, width - 1
    out = _channels_last(grid, batch, channels, frames, 2 * height, 2 * width)
    windows = grid.movedim(1, -1).unflatten(4, (4, channels))
    pixels = out.movedim(1, -1).view(batch, frames, height, 2, width, 2, channels)
    steps = [(p, slice(p, None, times)) for p in range(times)]
    if source is not None and frames < times * source.shape[2]:
        steps = [(times - 1, slice(None))]  # the first frame of a video
    for a in (0, 1):
        for b in (0, 1):
            phase = windows[:, :, a : a + height, b : b + width, 2 * a + b]
            target = pixels[:, :, :, a, :, b]
            if source is None:
                target.copy_(phase)
                continue
            for p, some in steps:
                added = _duplicated(source, channels, 4 * times, 4 * p + 2 * a + b)
                _add_into(target[:, some], phase[:, some], added.movedim(1, -1))
    return out


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
    batch, before, frames = x.shape[:3]
    group = before * times * size * size // channels
    blocks = x.movedim(1, -1).unflatten(3, (-1, size)).unflatten(2, (-1, size))
    if group % (size * size):
        # Groups that end inside of a block of pixels.
        fine = blocks.permute(0, 1, 2, 4, 6, 3, 5).flatten(4)
    else:
        wide = None if group == size * size else torch.promote_types(x.dtype, torch.float32)
        fine, group = blocks.mean(dim=(3, 5), dtype=wide), group // (size * size)
    missing = -frames % times
    if times > 1:
        spread = fine.new_zeros if missing else fine.new_empty
        shape = (batch, frames + missing, *fine.shape[2:4])
        inner = fine.shape[4] // before
        grown = spread(*shape[:1], shape[1] // times, *shape[2:], before, times, inner)
        # The phase of a frame is the dimension after its channels, and here the one after frames.
        by_frame = grown.permute(0, 1, 5, 2, 3, 4, 6)
        source = fine.unflatten(4, (before, inner))
        for p in range(times):
            late = int(p < missing)  # its first frame is one of those that lack
            by_frame[:, late:, p].copy_(source[:, late * times + p - missing :: times])
        fine = grown.flatten(4)
    if group > 1:
        fine = fine.unflatten(4, (channels, group)).mean(dim=5)
    result = fine.to(x.dtype).movedim(-1, 1)
    return result.clone() if result.data_ptr() == x.data_ptr() else result


def _duplicated(x: Tensor, channels: int, phases: int, phase: int) -> Tensor:
    """The channels of `x` that one phase of the `channels` of a larger picture repeats."""
    repeats = channels * phases // x.shape[1]
    if repeats == phases:
        return x
    if phases % repeats == 0:
        return x[:, phase // repeats :: phases // repeats]
    index = (torch.arange(channels, device=x.device) * phases + phase) // repeats
    return x.index_select(1, index)


def _add_into(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the sum in one pass; autograd records no `out`."""
    if torch.is_grad_enabled():
        target.copy_(a + b)
    else:
        torch.add(a, b, out=target)


def _inverse_norm(rows: Tensor) -> Tensor:
    """`1 / max(norm2(row), eps)` of each row, `[rows, 1]`."""
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return norm.clamp_min_(_NORM_EPS).reciprocal_()


def _channels_last(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised channels-last memory for `[B, C, T, H, W]`."""
    batch, channels, frames, height, width = shape
    shape = (batch, frames, height, width, channels)
    return torch.empty(shape, dtype=like.dtype, device=like.device).movedim(-1, 1)


def _fused_attention_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch has a kernel for these that never holds the `N x N` scores."""
    if q.device.type == "cpu":
        return True
    if q.device.type != "cuda":
        return False
    params = torch.backends.cuda.SDPAParams(
        q[:, None], k[:, None], v[:, None], None, 0.0, False, False
    )
    return torch.backends.cuda.can_use_flash_attention(
        params
    ) or torch.backends.cuda.can_use_efficient_attention(params)


def _blocks(x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the rows of `x` and of `out` (views) in blocks of about `_BLOCK_ELEMENTS`."""
    channels = x.shape[1]
    rows_per_block = max(1, _BLOCK_ELEMENTS // channels)
    for source, target in zip(x, out, strict=True):
        rows = source.movedim(0, -1).reshape(-1, channels)
        yield from zip(
            rows.split(rows_per_block),
            target.movedim(0, -1).view(-1, channels).split(rows_per_block),
            strict=True,
        )
