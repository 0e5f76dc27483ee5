"""The ops of the VAEs, stated once: formula, shapes and dtypes. This page is the contract.

Activations are `[B, C, T, H, W]` in channels-last memory, so that every pixel is a row of `C`
neighbouring numbers. Each op computes in float32 and rounds once, to the dtype of its result.

| op | formula |
|---|---|
| `rms_norm_silu` | `silu(x / max(norm2(x), 1e-12) * sqrt(C) * gamma)`; SiLU is optional |
| `attention` | `softmax(q k^T / sqrt(d)) v` in memory that grows with N, never with N x N |
| `interleave_time` | frame `phases * t + p` is the p-th part of the channels of frame `t` |
| `merge_phases` | pixel `(2 i + a, 2 j + b)` is part `2 a + b` of window `(i + a, j + b)` |
| `average_down` | means of groups of the numbers in each block of frames and pixels |
"""

from .reference import attention, average_down, interleave_time, merge_phases, rms_norm_silu

__all__ = ["attention", "average_down", "interleave_time", "merge_phases", "rms_norm_silu"]
