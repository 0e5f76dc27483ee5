"""Flash attention for one wide head, in Triton.

The scheme of Dao, "FlashAttention-2", 2023: a program holds a block of queries, loops over the keys
and values, and updates the softmax. Block sizes are powers of two but heads are not, so a head is
split into two parts, each with its own matrix products and sums: 384 is 256 and 128.

PyTorch's flash kernels end at heads of 256; the heads of the VAEs have 384 to 1024 channels.
"""

# ruff: noqa: ANN001, ANN202, N803 (kernels: Triton's types, constants in capitals)

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..devices import device_kind
from ..errors import Refusal
from ..reference.attention import FLASH_HEAD
from .convolution_kernels import product
from .runtime import launch
from .scalars import narrow
from .tiles import Chip, blocks, chip_of, refuse_span

# Smallest part of a matrix product, and the largest with affordable blocks.
_SMALLEST_PART, _LARGEST_PART = 16, 512


@dataclass(frozen=True)
class AttentionTile:
    """Block sizes of a program."""

    queries: int  # rows of queries that a program holds
    keys: int  # rows of keys and values per iteration
    warps: int  # of 32 threads; of 64 on AMD's data center GPUs
    stages: int  # blocks of keys and values that are loaded ahead


# Widest head by tile. These tiles compile without spills into the shared memory of the chips (163,
# 227, 227 and 99 KiB per program); of those that do, the ones with 64 queries, because each block
# reads all keys and values. They are not timed. On chips with fast memory, wider heads use matrix
# products, which move 20 to 28 bytes per pair of pixels for any head.
_LARGE = {384: AttentionTile(64, 32, 8, 3), 512: AttentionTile(64, 16, 8, 2)}
_TILES = {
    **dict.fromkeys(((8, 0), (10, 0), (10, 3)), _LARGE),
    (9, 0): {384: AttentionTile(64, 32, 8, 2)},
}
_TILES_OF_OTHERS = {
    384: AttentionTile(64, 16, 8, 3),
    512: AttentionTile(32, 32, 8, 2),
    640: AttentionTile(32, 16, 8, 2),
    1024: AttentionTile(32, 16, 8, 1),
}

# The same by the start of an AMD architecture, in 64 KiB. On gfx11, whose warps hold every value of
# the queries twice, all tiles spill; these the least with 32 queries, 80 and 88 registers.
_TILES_OF_AMD = {
    "gfx9": {640: AttentionTile(64, 16, 8, 2), 1024: AttentionTile(32, 16, 4, 1)},
    "gfx11": {384: AttentionTile(32, 16, 8, 1), 512: AttentionTile(32, 16, 16, 1)},
    "gfx12": {384: AttentionTile(32, 16, 8, 2), 512: AttentionTile(32, 16, 8, 1)},
}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute flash attention for heads that PyTorch's flash kernels do not take."""
    if device_kind(q.device) not in ("nvidia", "amd", "cpu"):
        raise Refusal("its tiles are for NVIDIA and AMD chips only")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise Refusal(f"{str(q.dtype).removeprefix('torch.')} runs on PyTorch's kernels")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1:
            raise Refusal(f"the last dimension of {name} is not dense")
    batch, length, channels = q.shape
    if channels <= FLASH_HEAD:
        raise Refusal(f"heads of up to {FLASH_HEAD} have flash kernels in PyTorch")
    parts = head_parts(channels)
    tile = tile_of(chip_of(q.device), channels)
    refuse_span(*(x.stride(1) * max(tile.queries, tile.keys) for x in (q, k, v)))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        _flash,
        (batch * blocks(length, tile.queries),),
        *(q, k, v, out, length, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        math.log2(math.e) / math.sqrt(channels),
        PART_0=parts[0],
        PART_1=parts[1],
        QUERIES=tile.queries,
        KEYS=tile.keys,
        EVEN=length % tile.keys == 0,
        warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def head_parts(channels: int) -> tuple[int, int]:
    """Split a head into two powers of two, of which the second can be 0, or refuse it."""
    large = min(_LARGEST_PART, 1 << channels.bit_length() - 1)
    small = channels - large
    if small & (small - 1) or not _SMALLEST_PART <= (small or large) <= _LARGEST_PART:
        raise Refusal(
            f"a head of {channels} is not a sum of up to two powers of two from "
            f"{_SMALLEST_PART} to {_LARGEST_PART}"
        )
    return large, small


def tile_of(chip: Chip, channels: int) -> AttentionTile:
    """Return the tile for a chip and a head, or refuse."""
    if isinstance(chip, str):
        found = [tiles for start, tiles in _TILES_OF_AMD.items() if chip.startswith(start)]
        if not found:
            raise Refusal(f"it has no tiles for {chip}; expected {', '.join(_TILES_OF_AMD)}")
        tiles = found[0]
    else:
        if chip < (8, 0):
            raise Refusal(f"compute capability is {chip[0]}.{chip[1]}; expected 8.0 or more")
        tiles = _TILES.get(chip, _TILES_OF_OTHERS)
    for widest, tile in tiles.items():
        if channels <= widest:
            return tile
    raise Refusal(f"heads above {max(tiles)} are left to matrix products on this chip")


@triton.jit
def _load(base, rows, columns, stride, there, EVEN: tl.constexpr):
    """Load rows of one part, with zeros for missing rows."""
    at = base + rows[:, None] * stride + columns[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=there[:, None], other=0.0)


@triton.jit
def _store(base, rows, columns, stride, there, values):
    at = base + rows[:, None] * stride + columns[None, :]
    tl.store(at, narrow(values, base.dtype.element_ty), mask=there[:, None])


@triton.jit(do_not_specialize=["length"])
def _flash(
    q, k, v, out, length, q_frame, q_row, k_frame, k_row, v_frame, v_row, scale,
    PART_0: tl.constexpr, PART_1: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Compute one block of the queries of one frame, which has `length` pixels."""
    # `scale` is `log2(e) / sqrt(d)`, because `exp2` replaces `exp`. Offsets within a block fit into
    # 32 bits; those of frames and blocks do not.
    blocks = tl.cdiv(length, QUERIES)
    frame = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks
    first = (first * QUERIES).to(tl.int64)
    q += frame * q_frame + first * q_row
    k += frame * k_frame
    v += frame * v_frame
    dtype = v.dtype.element_ty

    rows = tl.arange(0, QUERIES)
    asked = rows < length - first
    columns_0 = tl.arange(0, PART_0)
    q_0 = _load(q, rows, columns_0, q_row, asked, tl.constexpr(False))
    sum_0 = tl.zeros([QUERIES, PART_0], tl.float32)
    if PART_1 > 0:
        columns_1 = PART_0 + tl.arange(0, PART_1)
        q_1 = _load(q, rows, columns_1, q_row, asked, tl.constexpr(False))
        sum_1 = tl.zeros([QUERIES, PART_1], tl.float32)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)

    keys = tl.arange(0, KEYS)
    for start in range(0, length, KEYS):
        there = keys < length - start
        part = _load(k, keys, columns_0, k_row, there, EVEN)
        scores = product(
            q_0, tl.trans(part), tl.zeros([QUERIES, KEYS], tl.float32), tl.constexpr(False)
        )
        if PART_1 > 0:
            part = _load(k, keys, columns_1, k_row, there, EVEN)
            scores = product(q_1, tl.trans(part), scores, tl.constexpr(False))
        if not EVEN:
            scores = tl.where(there[None, :], scores, float("-inf"))

        # Rescale the sums to the new maximum.
        grown = tl.maximum(largest, tl.max(scores, 1) * scale)
        shrink = tl.exp2(largest - grown)
        weights = tl.exp2(scores * scale - grown[:, None])
        total = total * shrink + tl.sum(weights, 1)
        largest = grown

        weights = narrow(weights, dtype)
        part = _load(v, keys, columns_0, v_row, there, EVEN)
        sum_0 = product(weights, part, sum_0 * shrink[:, None], tl.constexpr(False))
        if PART_1 > 0:
            part = _load(v, keys, columns_1, v_row, there, EVEN)
            sum_1 = product(weights, part, sum_1 * shrink[:, None], tl.constexpr(False))
        k += KEYS * k_row
        v += KEYS * v_row

    channels = PART_0 + PART_1
    out += (frame * length + first) * channels
    inverse = 1.0 / total[:, None]
    _store(out, rows, columns_0, channels, asked, sum_0 * inverse)
    if PART_1 > 0:
        _store(out, rows, columns_1, channels, asked, sum_1 * inverse)
