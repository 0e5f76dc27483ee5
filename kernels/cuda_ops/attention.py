"""Attention in blocks of queries, with the softmax in one pass over the scores.

The products are those of the library. Between them PyTorch reads and writes the scores in float32,
and writes and reads the weights in float32 once more to round them; the kernel does both at once.
"""

import torch
from torch import Tensor

from ..errors import Refusal
from ..reference.attention import FLASH_HEAD, LIFT, in_blocks, multiplies_mixed
from .arguments import THREADS, pack_of, packed
from .runtime import launch, refuse_counts


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention in blocks of queries, with the kernel below for their softmax."""
    if q.shape[-1] <= FLASH_HEAD:
        raise Refusal(f"heads of up to {FLASH_HEAD} have flash kernels in PyTorch")
    if not multiplies_mixed(q):
        dtype = str(q.dtype).removeprefix("torch.")
        raise Refusal(f"PyTorch has no products of {dtype} whose results are float32")
    return in_blocks(q, k, v, weigh=softmax)


def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `LIFT` times the softmax of float32 rows `[B, rows, N]`, rounded once to `dtype`."""
    weights = torch.empty_like(scores, dtype=dtype)
    columns = scores.shape[-1]
    rows = scores.numel() // columns
    refuse_counts(rows, 2 * columns)
    tensors = ("P", (scores.data_ptr(),)), ("P", (weights.data_ptr(),))
    pack = pack_of(dtype, columns, *tensors)
    arguments = packed(*tensors, ("Iif", (rows, columns, LIFT)))
    launch("softmax", "weigh_rows", weights, rows, (THREADS, 1), arguments, PACK=pack)
    return weights
