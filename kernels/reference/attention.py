"""Attention with memory that grows linearly with the number of pixels."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ready.seen import fallback

# Scores that are held at a time without a fused kernel: 256 MiB in float32, and as much for their
# softmax.
_SCORE_ELEMENTS = 1 << 26

# Rows of scores are multiples of a tile of the matrix product, if there are enough rows.
_ROWS = 128

# The softmax weights of many pixels are below the resolution of float16; a power of two scales them
# without rounding.
LIFT = 2.0**15

# On CUDA, heads above 256 only have the memory-efficient kernel, with 32 queries at a time and its
# sums in global memory. It is expected to reach 60 to 120 TFLOP/s on an H200, and blocks of matrix
# products about 200, from some thousand pixels on (an estimate, until `bench_gpu.py` has a row).
FLASH_HEAD = 256
_MANY_PIXELS = 4096


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention by a fused kernel or in blocks of queries."""
    # The fused kernels only need memory for the result: the flash kernel on a CPU, the flash and
    # the memory-efficient kernel on CUDA.
    if not q.numel():
        return torch.empty_like(q)
    # The fused kernels need dense rows; otherwise PyTorch would materialise the scores.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    # Not in float32: the fused kernel reads each value once, and products without tensor cores wait
    # for arithmetic in both.
    wide = q.device.type == "cuda" and q.shape[2] > FLASH_HEAD and q.shape[1] >= _MANY_PIXELS
    plain = fallback().reference or (wide and multiplies_mixed(q))
    if not plain and _fused_attention_takes(q, k, v):
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
    return in_blocks(q, k, v)


def _weights(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `LIFT * softmax(scores)` of `[B, rows, N]`, rounded to `dtype`."""
    weights = torch.softmax(scores, -1)
    return torch.mul(weights, LIFT, out=torch.empty_like(weights, dtype=dtype))


def in_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, weigh: Callable[[Tensor, torch.dtype], Tensor] = _weights
) -> Tensor:
    """Compute whole frames at a time if `_SCORE_ELEMENTS` allows, otherwise rows of one frame."""
    # `weigh` returns `LIFT * softmax(scores)` in a dtype, where `multiplies_mixed`.
    batch, length, channels = q.shape
    frames = max(1, _SCORE_ELEMENTS // length**2)
    rows = max(1, _SCORE_ELEMENTS // (frames * length))
    rows = rows // _ROWS * _ROWS or rows
    mixed = multiplies_mixed(q)
    if not mixed:
        wide = torch.promote_types(q.dtype, torch.float32)
        k, v = k.to(wide), v.to(wide)
    out, scale = q.new_empty(q.shape), channels**-0.5
    for frame in range(0, batch, frames):
        group = slice(frame, frame + frames)
        keys, values = k[group].transpose(1, 2), v[group]
        for row in range(0, length, rows):
            block = slice(row, row + rows)
            queries = q[group, block]
            if mixed:
                weights = weigh(_mixed_product(queries, keys, scale), q.dtype)
                out[group, block] = _mixed_product(weights, values, 1 / LIFT)
            else:
                weights = torch.softmax(torch.matmul(queries.to(keys.dtype) * scale, keys), -1)
                out[group, block] = torch.matmul(weights, values)
    return out


def _mixed_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute `scale * a b` of 16-bit tensors in float32, which only CUDA supports."""
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=torch.float32)
    return torch.baddbmm(out, a, b, torch.float32, beta=0, alpha=scale, out=out)


def multiplies_mixed(x: Tensor) -> bool:
    """Return whether `_mixed_product` is used for `x` `[B, N, d]`: the device has such products."""
    if x.device.type != "cuda" or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    return _has_mixed_products(x.device, x.dtype)


@functools.cache
def _has_mixed_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Test once: PyTorch has them since 2.8, but not on every device with the type cuda."""
    ones = torch.ones(1, 16, 16, device=device, dtype=dtype)
    try:
        product = _mixed_product(ones, ones, 0.5)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False
    return bool((product == 8).all())


def _fused_attention_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether PyTorch has a kernel for these tensors without the `N x N` scores."""
    if q.device.type in ("cpu", "meta"):
        return True
    if q.device.type != "cuda":
        return False
    params = torch.backends.cuda.SDPAParams(
        q[:, None], k[:, None], v[:, None], None, 0.0, False, False
    )
    can = torch.backends.cuda
    return can.can_use_flash_attention(params) or can.can_use_efficient_attention(params)
