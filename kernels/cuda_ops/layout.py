"""Ops that move values between channels, frames and pixels."""

from torch import Tensor

from .. import shapes
from ..constraints import DTYPES, IMAGE_DTYPES, refuse_target
from ..errors import Refusal
from .arguments import THREADS, pack_of, vector, video
from .rows import launch_packs
from .runtime import NAMES, refuse_counts

# Packs of an item: `kEach * kThreads` of each source.
_MERGED = 2 * THREADS
_SPREAD = 4 * THREADS


def interleave_time(x: Tensor, out: Tensor, phases: int) -> Tensor:
    """Interleave as a shuffle."""
    return _spread(x, (phases, 1, 1), "thwc", out)


def merge_phases(
    grid: Tensor, source: Tensor | None, bias: Tensor | None, out: Tensor, times: int
) -> Tensor:
    """Write two packs of the picture per thread."""
    if 1 in grid.shape[3:]:
        raise Refusal("the picture is empty")
    channels, frames, width = out.shape[1], out.shape[2], out.shape[4]
    before = 0 if source is None else source.shape[1]
    # The first frame of a video is the last frame of its latent.
    missing = 0 if source is None else times * source.shape[2] - frames
    repeats = 1 if source is None else 4 * times * channels // before
    fields = video(grid), video(source), video(out), vector(bias)
    pack = pack_of(grid.dtype, channels, *fields)
    if before % pack:
        pack = 1
    refuse_counts(grid.shape[3] * grid.shape[4], 4 * times * channels)
    launch_packs(
        "merge_phases", "merge_windows", grid, out, fields, _MERGED, pack,
        (width, times, repeats), ("iii", (channels, before, missing)),
    )  # fmt: skip
    return out


def pixel_shuffle_3d(x: Tensor, out: Tensor, size: tuple[int, int, int], order: str) -> Tensor:
    """Move packs of channels, or single values, to `out` of any strides."""
    refuse_target(out, x, DTYPES)
    return _spread(x, size, order, out)


def frames_to_images(frames: Tensor, out: Tensor, patch: int, order: str) -> Tensor:
    """Convert the values that a shuffle moves."""
    refuse_target(out, frames, IMAGE_DTYPES)
    pixels = shapes.images_as_video(out, frames.shape[0])
    _spread(frames, (1, patch, patch), order, pixels, shapes.white(out.dtype))
    return out


def average_down(x: Tensor, out: Tensor, times: int, size: int) -> Tensor:
    """Average the values of a pack per thread."""
    channels, frames, width, before = out.shape[1], out.shape[2], out.shape[4], x.shape[1]
    group = before * times * size * size // channels
    pack = pack_of(x.dtype, channels, video(x), video(out)) if channels == before else 1
    refuse_counts(group * channels)
    numbers = before, group, times * frames - x.shape[2], 1 / group
    launch_packs(
        "average_down", "average_blocks", x, out, (video(x), video(out)), THREADS, pack,
        (width, times, size), ("iiif", numbers),
    )  # fmt: skip
    return out


def _spread(
    x: Tensor, size: tuple[int, int, int], order: str, out: Tensor, white: int = 0
) -> Tensor:
    """Write blocks of `size` to `out` `[B, C, T, H, W]`; `white`: [-1, 1] becomes 0 to `white`."""
    channels, width = out.shape[1], out.shape[4]
    steps = shapes.channel_steps(channels, size, order)
    strides = tuple(out.stride(dim) for dim in (0, 2, 3, 4, 1))
    pack, same = 1, x.dtype == out.dtype
    if same and not white and order[-1] == "c" and out.stride(1) == 1:
        moved = ("Pqq", (out.data_ptr(), *strides[:2])), ("Pqq", (out.data_ptr(), *strides[2:4]))
        pack = pack_of(x.dtype, channels, video(x), *moved)
    fields = (
        video(x), ("P", (out.data_ptr(),)), ("qqqqq", strides), ("qqqq", tuple(steps.values())),
    )  # fmt: skip
    launch_packs(
        "spread", "move_packs", x, out, fields, _SPREAD, pack, (width, *size),
        ("iif", (x.shape[1], x.shape[4], white)),
        RESULT=NAMES[out.dtype], SAME=int(same), IMAGES=int(white > 0),
    )  # fmt: skip
    return out
