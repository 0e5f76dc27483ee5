"""Ops on independent numbers: gates and sums."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..constraints import row_distance
from .arguments import THREADS, Fields, blocks, divisor, items, pack_of, packed, vector, video
from .runtime import launch, refuse_counts

# Packs of an item: `kEach * kThreads` of both sources.
_ITEM = 2 * THREADS


def silu_mul(x: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """Gate two packs per thread."""
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


def bias_residual(x: Tensor, *terms: Any) -> Tensor:  # noqa: ANN401
    """Add the terms to two packs per thread."""
    bias, residual, residual_bias, out = terms
    fields = video(x), video(residual), video(out), vector(bias), vector(residual_bias)
    pack = pack_of(x.dtype, x.shape[1], *fields)
    launch_packs("bias_residual", "add_terms", x, out, fields, _ITEM, pack)
    return out


def launch_packs(
    source: str,
    kernel: str,
    x: Tensor,
    out: Tensor,
    fields: Sequence[Fields],
    each: int,
    pack: int,
    divisors: Sequence[int] = (),
    numbers: Fields = ("", ()),
    **constants: object,
) -> None:
    """Write the frames of `out` `[B, C, T, H, W]` in items of `each` packs of `pack` numbers."""
    batch, channels, frames, height, width = out.shape
    packs = height * width * channels // pack
    refuse_counts(packs + each)
    work = items(blocks(packs, each), frames, batch)
    divisors = channels // pack, *divisors
    arguments = packed(*fields, work.fields, *map(divisor, divisors), ("I", (packs,)), numbers)
    launch(source, kernel, x, work.count, (THREADS, 1), arguments, PACK=pack, **constants)
