"""Ops that move values between channels, frames and pixels."""

import torch
from torch import Tensor

from .. import shapes
from ..constraints import DTYPES, image_target, refuse_target, refuse_videos, video_target
from ..errors import Refusal
from .arguments import THREADS, blocks, dense, divisor, items, pack_of, packed, vector, video
from .runtime import dtype_name, launch, refuse_counts

# Packs of an item: `kEach * kThreads` of each source.
_MERGED = 2 * THREADS
_SPREAD = 4 * THREADS


def interleave_time(x: Tensor, phases: int, *, out: Tensor | None = None) -> Tensor:
    """Interleave as a shuffle."""
    out = video_target(shapes.interleaved(x, phases), out, x=x)
    _spread(x, (phases, 1, 1), "thwc", out)
    return out


def merge_phases(
    grid: Tensor,
    source: Tensor | None = None,
    times: int = 1,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Write two packs of the picture per thread."""
    if 1 in grid.shape[3:]:
        raise Refusal("the picture is empty")
    out = video_target(shapes.merged(grid), out, grid=grid, source=source)
    batch, channels, frames, height, width = out.shape
    before = 0 if source is None else source.shape[1]
    # The first frame of a video is the last frame of its latent.
    missing = 0 if source is None else times * source.shape[2] - frames
    repeats = 1 if source is None else 4 * times * channels // before
    fields = video(grid), video(source), video(out), vector(bias := dense(bias, grid))
    pack = pack_of(grid.dtype, channels, *fields)
    if before % pack:
        pack = 1
    packs = height * width * channels // pack
    refuse_counts(packs + _MERGED, grid.shape[3] * grid.shape[4], 4 * times * channels)
    work = items(blocks(packs, _MERGED), frames, batch)
    divisors = (divisor(each) for each in (channels // pack, width, times, repeats))
    sizes = ("Iiii", (packs, channels, before, missing))
    arguments = packed(*fields, work.fields, *divisors, sizes)
    launch("merge_phases", "merge_windows", grid, work.count, (THREADS, 1), arguments, PACK=pack)
    return out


def pixel_shuffle_3d(
    x: Tensor, size: tuple[int, int, int], order: str = "cthw", *, out: Tensor | None = None
) -> Tensor:
    """Move packs of channels, or single values, to `out` of any strides."""
    refuse_videos(x=x)
    refuse_target(out, x, DTYPES)
    out = shapes.new_video(x, shapes.shuffled(x, size)) if out is None else out
    _spread(x, size, order, out)
    return out


def frames_to_images(
    frames: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    patch: int = 1,
    order: str = "cthw",
    out: Tensor | None = None,
) -> Tensor:
    """Convert the values that a shuffle moves."""
    out, pixels = image_target(frames, dtype, patch, out)
    _spread(frames, (1, patch, patch), order, pixels, shapes.white(out.dtype))
    return out


def average_down(x: Tensor, channels: int, *, times: int, size: int) -> Tensor:
    """Average the values of a pack per thread."""
    refuse_videos(x=x)
    out = shapes.new_video(x, shapes.averaged(x, channels, times, size))
    batch, _, frames, height, width = out.shape
    before = x.shape[1]
    group = before * times * size * size // channels
    pack = pack_of(x.dtype, channels, video(x), video(out)) if channels == before else 1
    packs = height * width * channels // pack
    refuse_counts(packs + THREADS, group * channels)
    work = items(blocks(packs, THREADS), frames, batch)
    divisors = (divisor(each) for each in (channels // pack, width, times, size))
    sizes = ("Iiiif", (packs, before, group, times * frames - x.shape[2], 1 / group))
    arguments = packed(video(x), video(out), work.fields, *divisors, sizes)
    launch("average_down", "average_blocks", x, work.count, (THREADS, 1), arguments, PACK=pack)
    return out


def _spread(x: Tensor, size: tuple[int, int, int], order: str, out: Tensor, white: int = 0) -> None:
    """Write blocks of `size` to `out` `[B, C, T, H, W]`; `white`: [-1, 1] becomes 0 to `white`."""
    batch, channels, frames, height, width = out.shape
    steps = shapes.channel_steps(channels, size, order)
    strides = tuple(out.stride(dim) for dim in (0, 2, 3, 4, 1))
    pack, same = 1, x.dtype == out.dtype
    if same and not white and order[-1] == "c" and out.stride(1) == 1:
        moved = ("Pqq", (out.data_ptr(), *strides[:2])), ("Pqq", (out.data_ptr(), *strides[2:4]))
        pack = pack_of(x.dtype, channels, video(x), *moved)
    packs = height * width * channels // pack
    refuse_counts(packs + _SPREAD)
    work = items(blocks(packs, _SPREAD), frames, batch)
    divisors = (divisor(each) for each in (channels // pack, width, *size))
    arguments = packed(
        video(x), ("P", (out.data_ptr(),)), ("qqqqq", strides),
        ("qqqq", tuple(steps.values())), work.fields, *divisors,
        ("Iiif", (packs, x.shape[1], x.shape[4], white)),
    )  # fmt: skip
    launch(
        "spread", "move_packs", x, work.count, (THREADS, 1), arguments,
        PACK=pack, RESULT=dtype_name(out.dtype), SAME=int(same), IMAGES=int(white > 0),
    )  # fmt: skip
