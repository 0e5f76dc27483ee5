"""Ops that move values between channels, frames and pixels."""

# ruff: noqa: ANN001, ANN202, N803 (kernels: Triton's types, constants in capitals)

import triton
import triton.language as tl
from torch import Tensor

from .. import shapes
from ..constraints import DTYPES, IMAGE_DTYPES, refuse_target
from ..errors import Refusal
from .runtime import launch
from .scalars import narrow
from .tiles import ELEMENTS, OFFSET_LIMIT, blocks, frame_grid, power_of_two, refuse_span, strides
from .tiles import tile as tile_of

# Values of a row of pixels that a program writes.
_RUN = ELEMENTS // 2


def interleave_time(x: Tensor, out: Tensor, phases: int) -> Tensor:
    """Interleave as a shuffle."""
    return _write_blocks(x, (phases, 1, 1), "thwc", out)


def merge_phases(
    grid: Tensor, source: Tensor | None, bias: Tensor | None, out: Tensor, times: int
) -> Tensor:
    """Write the four pixels of each window of a part of a row per program."""
    if 1 in grid.shape[3:]:
        raise Refusal("the picture is empty")
    channels, frames, height, width = out.shape[1], out.shape[2], *grid.shape[3:]
    height, width = height - 1, width - 1
    size, block, warps = tile_of(channels, ELEMENTS // 2)
    parts = blocks(width, size)
    before = 1 if source is None else source.shape[1]
    # The first frame of a video is the last frame of its latent.
    missing = 0 if source is None else times * source.shape[2] - frames
    times = 1 if source is None else times
    launch(
        _merge_phases,
        frame_grid(parts * height, out, grid),
        *(grid, source, bias, out, width, parts, missing),
        *strides(grid), *strides(source), *strides(out),
        warps=warps, CHANNELS=channels, BEFORE=before, TIMES=times,
        REPEATS=max(1, 4 * times * channels // before), COLUMNS=size, BLOCK=block,
    )  # fmt: skip
    return out


def pixel_shuffle_3d(x: Tensor, out: Tensor, size: tuple[int, int, int], order: str) -> Tensor:
    """Write runs of values to `out` of any strides."""
    refuse_target(out, x, DTYPES)
    return _write_blocks(x, size, order, out)


def frames_to_images(frames: Tensor, out: Tensor, patch: int, order: str) -> Tensor:
    """Convert the values that a shuffle moves."""
    refuse_target(out, frames, IMAGE_DTYPES)
    pixels = shapes.images_as_video(out, frames.shape[0])
    _write_blocks(frames, (1, patch, patch), order, pixels, shapes.white(out.dtype))
    return out


def _write_blocks(
    x: Tensor, size: tuple[int, int, int], order: str, out: Tensor, white: int = 0
) -> Tensor:
    """Write blocks of `size` to `out` `[B, C, T, H, W]`; `white`: [-1, 1] becomes 0 to `white`."""
    before, height, width = x.shape[1], x.shape[3], x.shape[4]
    channels, (_, high, wide) = out.shape[1], size
    steps = shapes.channel_steps(channels, size, order)
    row, column, channel = out.stride(3), out.stride(4), out.stride(1)
    if high == 1 and row == width * wide * column and height * row < OFFSET_LIMIT:
        # Rows without gaps are one run, so that short rows fill a program.
        height, width, row = 1, height * width, 0
    numbers = width * wide * channels
    refuse_span(width * before, numbers, width * wide * column + channels * channel)
    block = min(_RUN, power_of_two(numbers))
    runs = blocks(numbers, block)
    launch(
        _spread,
        frame_grid(runs * height, out),
        *(x, out, numbers, width * before, runs, *strides(x), *strides(out), row, column, channel),
        **dict(zip(("TIMES", "HIGH", "WIDE"), size, strict=True)),
        **{f"{letter.upper()}_STEP": step for letter, step in steps.items()},
        DENSE=(channels == 1 or channel == 1) and (wide * width == 1 or column == channels),
        BEFORE=before, CHANNELS=channels, WHITE=white, BLOCK=block,
    )  # fmt: skip
    return out


def average_down(x: Tensor, out: Tensor, times: int, size: int) -> Tensor:
    """Average the values of a part of a row per program."""
    _, channels, frames, height, width = out.shape
    before = x.shape[1]
    count, block, warps = tile_of(channels, ELEMENTS // 2)
    parts = blocks(width, count)
    refuse_span(size * x.shape[4] * before)
    launch(
        _average_down,
        frame_grid(parts * height, out, x),
        *(x, out, width, parts, times * frames - x.shape[2], *strides(x), *strides(out)),
        warps=warps, BEFORE=before, CHANNELS=channels, TIMES=times, SIZE=size,
        GROUP=before * times * size * size // channels, COLUMNS=count, BLOCK=block,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["width", "parts", "missing"])
def _merge_phases(
    grid, source, bias, out, width, parts, missing,
    grid_batch, grid_frame, source_batch, source_frame, out_batch, out_frame,
    CHANNELS: tl.constexpr, BEFORE: tl.constexpr, TIMES: tl.constexpr, REPEATS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the four phases of a part of a row of windows."""
    line = tl.program_id(0) // parts
    first = (tl.program_id(0) - line * parts) * COLUMNS
    frame = tl.program_id(1)
    video = tl.program_id(2).to(tl.int64)
    column, channel = tl.arange(0, COLUMNS)[:, None], tl.arange(0, BLOCK)
    exists = channel < CHANNELS
    mask = (first + column < width) & exists[None, :]
    grid += video * grid_batch + frame.to(tl.int64) * grid_frame
    out += video * out_batch + frame.to(tl.int64) * out_frame
    whole, phase = frame, frame
    if source is not None:
        whole = (frame + missing) // TIMES
        phase = frame + missing - whole * TIMES
        source += video * source_batch + whole.to(tl.int64) * source_frame
        source += (line * width + first).to(tl.int64) * BEFORE
    added = 0.0
    if bias is not None:
        added = tl.load(bias + channel, mask=exists, other=0).to(tl.float32)[None, :]

    for a in tl.static_range(2):  # pyright: ignore
        for b in tl.static_range(2):  # pyright: ignore
            window = ((line + a) * (width + 1) + first + b).to(tl.int64)
            place = grid + window * (4 * CHANNELS) + (2 * a + b) * CHANNELS
            v = tl.load(place + column * (4 * CHANNELS) + channel[None, :], mask=mask, other=0)
            if bias is not None:
                v = v.to(tl.float32) + added
            if source is not None:
                index = ((channel * TIMES + phase) * 4 + 2 * a + b) // REPEATS
                more = tl.load(source + column * BEFORE + index[None, :], mask=mask, other=0)
                v = v.to(tl.float32) + more.to(tl.float32)
            if bias is not None or source is not None:
                v = narrow(v, out.dtype.element_ty)
            pixel = ((2 * line + a).to(tl.int64) * width + first) * 2 + b
            tl.store(
                out + pixel * CHANNELS + (column * (2 * CHANNELS) + channel[None, :]), v, mask=mask
            )


# Triton specialises on numbers that are multiples of 16: the mask of a wide store depends on it.
@triton.jit(do_not_specialize=["runs"])
def _spread(
    x, out, numbers, x_row, runs,
    x_batch, x_frame, out_batch, out_frame, out_row, out_column, out_channel,
    BEFORE: tl.constexpr, CHANNELS: tl.constexpr,
    TIMES: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    C_STEP: tl.constexpr, T_STEP: tl.constexpr, H_STEP: tl.constexpr, W_STEP: tl.constexpr,
    DENSE: tl.constexpr, WHITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a run of the values of `HIGH` rows of the result. All divisors are constants."""
    line = tl.program_id(0) // runs
    number = (tl.program_id(0) - line * runs) * BLOCK + tl.arange(0, BLOCK)
    frame = tl.program_id(1)
    video = tl.program_id(2).to(tl.int64)
    mask = number < numbers
    pixel = number // CHANNELS
    channel = number - pixel * CHANNELS
    column = pixel // WIDE
    w = pixel - column * WIDE
    source = column * BEFORE + channel * C_STEP + w * W_STEP
    target = number if DENSE else pixel * out_column + channel * out_channel

    whole = frame // TIMES
    t = frame - whole * TIMES
    x += video * x_batch + whole.to(tl.int64) * x_frame
    x += line.to(tl.int64) * x_row + t * T_STEP
    out += video * out_batch + frame.to(tl.int64) * out_frame
    for a in tl.static_range(HIGH):  # pyright: ignore
        v = tl.load(x + a * H_STEP + source, mask=mask, other=0)
        if WHITE > 0:
            y = (v.to(tl.float32) + 1) * 0.5
            y = tl.where(y < 0, 0.0, y)
            y = tl.where(y > 1, 1.0, y)
            if out.dtype.element_ty == tl.uint8:
                v = tl.where(y == y, y * WHITE, 0.0).to(tl.int32).to(tl.uint8)
            elif out.dtype.element_ty == tl.uint16:
                v = _nearest(tl.where(y == y, y * WHITE, 0.0)).to(tl.uint16)
            else:
                v = narrow(y, out.dtype.element_ty)
        elif x.dtype.element_ty != out.dtype.element_ty:
            v = narrow(v.to(tl.float32), out.dtype.element_ty)
        tl.store(out + (line * HIGH + a).to(tl.int64) * out_row + target, v, mask=mask)


@triton.jit
def _nearest(y):
    """Round `y >= 0` to nearest even; a sum with `y` could be fused with the product that it is."""
    whole = y.to(tl.int32)
    middle = whole.to(tl.float32) + 0.5
    up = (y > middle) | ((y == middle) & (whole % 2 == 1))
    return whole + up.to(tl.int32)


@triton.jit(do_not_specialize=["width", "parts", "missing"])
def _average_down(
    x, out, width, parts, missing, x_batch, x_frame, out_batch, out_frame,
    BEFORE: tl.constexpr, CHANNELS: tl.constexpr, TIMES: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write all channels of a part of a row of the result."""
    line = tl.program_id(0) // parts
    first = (tl.program_id(0) - line * parts) * COLUMNS
    frame = tl.program_id(1)
    video = tl.program_id(2).to(tl.int64)
    column, channel = tl.arange(0, COLUMNS)[:, None], tl.arange(0, BLOCK)
    row = width * (SIZE * BEFORE)  # values of a row of `x`
    x += video * x_batch + (line * SIZE).to(tl.int64) * row + first.to(tl.int64) * (SIZE * BEFORE)

    total = tl.zeros((COLUMNS, BLOCK), tl.float32)
    for m in range(GROUP):
        # Index of the m-th value that is averaged into each channel; the column is the finest
        # index.
        index = channel * GROUP + m
        above = index // SIZE
        block = above // SIZE
        before = block // TIMES
        time = frame * TIMES + (block - before * TIMES) - missing
        inside = (above - block * SIZE) * row + (index - above * SIZE) * BEFORE + before
        place = x + time.to(tl.int64) * x_frame + inside
        mask = (first + column < width) & ((channel < CHANNELS) & (time >= 0))[None, :]
        v = tl.load(place[None, :] + column * (SIZE * BEFORE), mask=mask, other=0)
        total += v.to(tl.float32)

    out += video * out_batch + frame.to(tl.int64) * out_frame
    out += (line * width + first).to(tl.int64) * CHANNELS
    mask = (first + column < width) & (channel < CHANNELS)[None, :]
    mean = narrow(total * (1.0 / GROUP), out.dtype.element_ty)
    tl.store(out + column * CHANNELS + channel[None, :], mean, mask=mask)
