"""A causal convolution of a part of every frame, with the lines of other ranks around it.

The lines of the new frames are exchanged first. Everything after that is this rank's own work, and
can be repeated in smaller pieces when memory runs out. Tails keep the lines with their frames.
"""

import functools
from typing import Protocol

import torch
from torch import Tensor

from ...kernels import Fused, is_out_of_memory
from .conv import Terms
from .frame_runs import Settling, fitted, halves, run_of
from .halo import Halo, Write, exchanged, halo_of
from .lines import Lines
from .temporal_cache import TemporalCache


class HaloConv(Protocol):
    """The part of `CausalConv3d` that is used here."""

    context: int
    padding: int
    stride: int

    @property
    def weight(self) -> Tensor:
        """The weight `[C_out, C_in, T, H, W]`."""
        ...

    def fusing(self, x: Tensor, cache: TemporalCache, *, norm: bool = False) -> Fused:
        """Return what is fused for `x` `[B, C_in, T, H, W]` in `cache`; `norm`: with a norm."""
        ...

    def of_window(
        self,
        window: Tensor,
        cache: TemporalCache,
        pads: tuple[int, int],
        terms: Terms = ...,
        *,
        by_pointer: bool = False,
    ) -> Tensor:
        """Convolve a window.

        Args:
            window: `[B, C_in, T, H, W]`, with the tail unless it is read `by_pointer`.
            cache: State of the video.
            pads: Rows and columns of zero padding on each side.
            terms: Bias and residual to add, or a norm to apply.
            by_pointer: The window is the new frames only.

        Returns:
            `[B, C_out, T, H, W]`.
        """
        ...

    def tail(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Return the tail `[B, C_in, context, H, W]` before `x` from `cache`."""
        ...

    def keep(self, x: Tensor, cache: TemporalCache) -> None:
        """Store the last frames of `x` `[B, C_in, T, H, W]` in `cache` as the tail."""
        ...


def convolve(
    conv: HaloConv, held: list[Tensor], cache: TemporalCache, write: Write, terms: Terms
) -> Tensor:
    """Convolve `write(x)` causally.

    Args:
        conv: The convolution, with a padding.
        held: `x`, `[B, C_in, T, H, W]`, the part of this rank; taken out, so that it can be freed.
        cache: State of the video, with a shard.
        write: Writes `x` into a buffer, see `Fill`; None: a copy.
        terms: Bias and residual to add, or a norm to apply.

    Returns:
        `[B, C_out, T / stride, H, W]`, channels-last.

    Raises:
        RuntimeError: The frames are not divided.
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


def input_like(conv: HaloConv, x: Tensor, cache: TemporalCache) -> tuple[Tensor, tuple[int, int]]:
    """Return a tensor like the input of the products, and their padding.

    Args:
        conv: The convolution.
        x: `[B, C_in, T, H, W]`, the part of this rank.
        cache: State of the video.

    Returns:
        `[B, C_in, T, H, W]` without useful values, and rows and columns.
    """
    halo = halo_of(cache, conv.padding)
    return (x, (conv.padding, conv.padding)) if halo is None else (halo.like(x), halo.pads)


def _surrounded(
    conv: HaloConv,
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
    conv: HaloConv,
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
    conv: HaloConv,
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
