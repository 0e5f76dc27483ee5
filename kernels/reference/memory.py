"""Memory access of the reference: blocks and buffers."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..constraints import overlaps

# Elements per block: 4 MB of float32. 0.4 M to 1.6 M are equally fast; smaller blocks cost calls,
# and the whole tensor costs fresh pages (19 ms instead of 2.3 ms for [32768, 192]; two cores of a
# Zen 5 server, 2026-11).
_BLOCK_ELEMENTS = 1_000_000

# On other devices a block only bounds the scratch: 64 MB of float32, so that a launch is cheap
# against the work of its kernel.
_DEVICE_BLOCK_ELEMENTS = 1 << 24


def widened(x: Tensor) -> torch.dtype:
    """Return the dtype in which a function of `x` `[...]` is computed."""
    return torch.promote_types(x.dtype, torch.float32)


def copies(x: Tensor, wide: torch.dtype) -> Iterator[Tensor]:
    """Yield copies of blocks of `x` `[..., C]` in dtype `wide`; each is valid until the next."""
    scratch: Tensor | None = None
    for (block,) in _blocks(x):
        if scratch is None:  # the first block is the largest
            scratch = torch.empty(block.numel(), dtype=wide, device=x.device)
        yield scratch[: block.numel()].view(block.shape).copy_(block)


def map_blocks(
    step: Callable[..., object],
    x: Tensor,
    out: Tensor,
    *others: Tensor,
    wide: torch.dtype | None = None,
) -> None:
    """Compute `out` from `x` `[..., C]` block by block in the dtype `wide`, and round once."""
    # `step` gets a copy of a block of `x`, which it overwrites with the result, and the blocks of
    # `others`. The last dimension is never split. `out` can have any dtype, strides and device, and
    # be `x` or one of `others`; those that it overlaps otherwise are copied.
    wide = wide or widened(x)
    x, *rest = (each.clone() if overlaps(out, each, same=True) else each for each in (x, *others))
    parts = _blocks(out, *rest, elements=_limit(x))
    for work, (target, *more) in zip(copies(x, wide), parts, strict=True):
        step(work, *more)
        # Round first, so that only the rounded values are copied to another device.
        target.copy_(work if out.device == x.device else work.to(out.dtype))


def _limit(x: Tensor) -> int:
    return _BLOCK_ELEMENTS if x.device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS


def _blocks(*tensors: Tensor, elements: int | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one shape into equal blocks along the first dimensions, for any strides."""
    count, shape = tensors[0].numel(), tensors[0].shape[:-1]
    limit = elements or _limit(tensors[0])
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if count == 0:
        return
    if count <= limit or dim is None:
        yield tensors
        return
    rows = max(1, limit * shape[dim] // count)
    for parts in zip(*(tensor.split(rows, dim) for tensor in tensors), strict=True):
        yield from _blocks(*parts, elements=limit)
