"""A causal convolution of a part of every frame, with the lines of other ranks around it.

The lines of the new frames are exchanged first. Everything after that is this rank's own work, and
can be repeated in smaller pieces when memory runs out. Tails keep the lines with their frames.
"""

import functools

import torch
from torch import Tensor

from ...kernels import is_out_of_memory
from .conv import Terms
from .frame_runs import Settling, fitted, halves, run_of
from .halo import Halo, Write, exchanged, halo_of
from .lines import Lines
from .row_bands import SplitConv
from .temporal_cache import TemporalCache


def convolve(
    conv: SplitConv, held: list[Tensor], cache: TemporalCache, write: Write, terms: Terms
) -> Tensor:
    """Convolve `write(x)` causally; `x`, taken out of `held`, is freed early.

    Without `write` it is copied.
    """
    x = held[0]
    halo = halo_of(cache, conv.padding)
    if halo is None or cache.shard is None:
        raise RuntimeError("the frames are not divided; expected a shard")
    lines = exchanged(cache.shard, x, halo, cache, write)
    if cache.settling is not None and not cache.first:
        return _settled(conv, cache.settling, x, lines, halo, cache, write, terms)
    del x
    return _surrounded(conv, held, lines, halo, cache, write, terms)


def input_like(conv: SplitConv, x: Tensor, cache: TemporalCache) -> tuple[Tensor, tuple[int, int]]:
    """Return a tensor in the shape of the input of the products, and what they pad."""
    halo = halo_of(cache, conv.padding)
    return (x, (conv.padding, conv.padding)) if halo is None else (halo.like(x), halo.pads)


def _surrounded(
    conv: SplitConv,
    held: list[Tensor],
    lines: Lines,
    halo: Halo,
    cache: TemporalCache,
    write: Write,
    terms: Terms,
) -> Tensor:
    """Convolve `write(held.pop())` with `lines` around it; in two parts where memory is short."""
    window: Tensor | None = None
    fresh: Tensor | None = None
    try:
        norm = terms.gamma is not None
        window, fresh = _entered(conv, held[0], lines, halo, cache, write, norm=norm)
        if cache.first and not cache.single_frame and conv.context:
            conv.tail(fresh, cache)  # allocated here, because `keep` must not fail
        held.clear()
        by_pointer = window.shape[2] == fresh.shape[2]
        y = conv.of_window(window, cache, halo.pads, terms, by_pointer=by_pointer)
    except Exception as error:
        relief = cache.workspace.relief
        if relief is None or not is_out_of_memory(error):
            raise
        failed = error.with_traceback(None)
        relief.note("convolutions in smaller pieces")
    else:
        conv.keep(fresh, cache)
        return y
    # Outside the except block: the error's traceback would keep tensors alive.
    if fresh is not None and not held:
        inner = halo.inner(fresh)
        held, write = [cache.attempt(inner.clone)], None
        del inner
    del window, fresh
    pieces = []
    for part, steps in halves(held[0].shape[2], conv.stride):
        added = terms.of(functools.partial(run_of, frames=steps, attempt=cache.attempt))
        run = [run_of(held[0], part, cache.attempt)]
        # A norm by the statistics of each frame has those of the part.
        of = getattr(write, "of", None)
        given_part = lines.of(part), halo, cache, write if of is None else of(part), added
        pieces.append(_surrounded(conv, run, *given_part))
    if not pieces:
        raise failed
    return cache.attempt(lambda: torch.cat(pieces, dim=2))


def _entered(
    conv: SplitConv,
    x: Tensor,
    lines: Lines,
    halo: Halo,
    cache: TemporalCache,
    write: Write,
    *,
    norm: bool,
) -> tuple[Tensor, Tensor]:
    """Write `x` and `lines` where the convolution reads them best; return as `Halo.window`."""
    by_pointer = cache.first or conv.fusing(x, cache, norm=norm).tail
    joins = conv.context > 0 and not by_pointer
    tail = functools.partial(conv.tail, cache=cache) if joins else None
    return halo.window(x, lines, cache, write, conv.context, tail)


def _settled(
    conv: SplitConv,
    settling: Settling,
    x: Tensor,
    lines: Lines,
    halo: Halo,
    cache: TemporalCache,
    write: Write,
    terms: Terms,
) -> Tensor:
    """Convolve a chunk whose last frames are static, see `CausalConv3d`."""
    cache.settling = settling = settling.behind(conv.weight.shape[2], conv.stride)
    results = settling.needed if terms.residual is None else max(1, settling.needed)
    if not results:
        batch, _, _, height, width = x.shape
        return cache.attempt(lambda: x.new_empty(batch, len(conv.weight), 0, height, width))
    terms = terms.of(lambda residual: cache.attempt(lambda: fitted(residual, results)))
    frames = results * conv.stride
    fresh, like = min(x.shape[2], frames), halo.like(x)
    batch, channels, _, height, width = like.shape
    window = cache.scratch((batch, channels, conv.context + frames, height, width), x)
    known = conv.context + fresh
    window[:, :, : conv.context] = conv.tail(like, cache)
    if fresh:
        inner = window[:, :, conv.context : known]
        halo.fill(inner, x[:, :, :fresh], lines.of(slice(0, fresh)), cache, write)
    window[:, :, known:] = window[:, :, known - 1 : known]
    conv.tail(like, cache).copy_(window[:, :, frames:])
    return conv.of_window(window, cache, halo.pads, terms)
