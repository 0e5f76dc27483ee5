"""Ops on independent numbers: gates and sums."""

from torch import Tensor

from ..constraints import refuse_overlap, refuse_rows, row_distance, video_target
from .arguments import THREADS, blocks, dense, divisor, items, pack_of, packed, vector, video
from .runtime import launch, refuse_counts

# Packs of an item: `kEach * kThreads` of both sources.
_ITEM = 2 * THREADS


def silu_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gate two packs per thread."""
    refuse_rows(x=x, gate=gate, out=out)
    refuse_overlap(out, x=x, gate=gate, same=True)
    out = x.new_empty(x.shape) if out is None else out
    channels, tensors = x.shape[-1], (x, gate, out)
    distances = [row_distance(each) for each in tensors]
    rows = [
        ("Pqq", (each.data_ptr(), distance, 0))
        for each, distance in zip(tensors, distances, strict=True)
    ]
    pack = pack_of(x.dtype, channels, *rows)
    packs = x.numel() // pack
    refuse_counts(packs + _ITEM, channels)
    count = blocks(packs, _ITEM)
    pointers = ("PPP", tuple(each.data_ptr() for each in tensors))
    sizes = ("II", (count, packs))
    arguments = packed(pointers, ("qqq", tuple(distances)), sizes, divisor(channels // pack))
    launch("silu_mul", "gate_rows", x, count, (THREADS, 1), arguments, PACK=pack)
    return out


def bias_residual(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add the terms to two packs per thread."""
    out = video_target(x.shape, out, x=x, residual=residual, same=True)
    batch, channels, frames, height, width = x.shape
    bias, residual_bias = dense(bias, x), dense(residual_bias, x)
    fields = video(x), video(residual), video(out), vector(bias), vector(residual_bias)
    pack = pack_of(x.dtype, channels, *fields)
    packs = height * width * channels // pack
    refuse_counts(packs + _ITEM)
    work = items(blocks(packs, _ITEM), frames, batch)
    arguments = packed(*fields, work.fields, divisor(channels // pack), ("I", (packs,)))
    launch("bias_residual", "add_terms", x, work.count, (THREADS, 1), arguments, PACK=pack)
    return out
