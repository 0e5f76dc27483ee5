"""Attention in memory that grows with the number of pixels alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import Refusal

# Largest score matrix, in elements, that attention without a fused kernel may hold at a time.
_SCORE_ELEMENTS = 1 << 25


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One of PyTorch's fused kernels, or blocks of queries.

    The fused ones need memory for the result alone, whatever the head size: the flash kernel of a
    CPU, and on CUDA the memory-efficient one.
    """
    if q.ndim != 3:
        raise Refusal(f"q is {list(q.shape)}; expected [B, N, d]")
    if not q.numel():
        return torch.empty_like(v)
    # The fused kernels want dense rows, and where they do not get them the scores are made.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if _fused_attention_takes(q, k, v):
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
    rows = max(1, _SCORE_ELEMENTS // (k.shape[0] * k.shape[1]))
    keys = k.transpose(1, 2)
    parts = []
    for part in q.split(rows, dim=1):
        scores = torch.matmul(part * q.shape[-1] ** -0.5, keys)
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32))
        parts.append(torch.matmul(weights.to(v.dtype), v))
    return torch.cat(parts, dim=1)


def _fused_attention_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch has a kernel for these that never holds the `N x N` scores."""
    if q.device.type in ("cpu", "meta"):
        return True
    if q.device.type != "cuda":
        return False
    params = torch.backends.cuda.SDPAParams(
        q[:, None], k[:, None], v[:, None], None, 0.0, False, False
    )
    return torch.backends.cuda.can_use_flash_attention(
        params
    ) or torch.backends.cuda.can_use_efficient_attention(params)
