"""Ops that move values between channels, frames and pixels."""

import torch
from einops import rearrange
from torch import Tensor

from .. import shapes
from .memory import map_blocks, widened


def interleave_time(x: Tensor, out: Tensor, phases: int) -> Tensor:
    """Interleave as one strided copy."""
    target = out.unflatten(2, (x.shape[2], phases))
    # No `rearrange`, which imports TorchDynamo before PyTorch 2.8: seconds in a first decode.
    target.copy_(x.unflatten(1, (phases, -1)).permute(0, 2, 3, 1, 4, 5))
    return out


def merge_phases(
    grid: Tensor, source: Tensor | None, bias: Tensor | None, out: Tensor, times: int
) -> Tensor:
    """Merge as a strided copy or sum per phase."""
    _, channels, frames, height, width = grid.shape
    channels, height, width = channels // 4, height - 1, width - 1
    windows = grid.movedim(1, -1).unflatten(4, (4, channels))
    pixels = out.movedim(1, -1).unflatten(3, (width, 2)).unflatten(2, (height, 2))
    bias = None if bias is None else bias.flatten().to(widened(grid))
    steps = [(p, slice(p, None, times)) for p in range(times)]
    if source is None:
        steps = [(0, slice(None))]
    elif frames < times * source.shape[2]:
        steps = [(times - 1, slice(None))]  # the first frame of a video
    for a in (0, 1):
        for b in (0, 1):
            phase = windows[:, :, a : a + height, b : b + width, 2 * a + b]
            target = pixels[:, :, :, a, :, b]
            for p, some in steps:
                added = None
                if source is not None:
                    added = _duplicated(source, channels, 4 * times, 4 * p + 2 * a + b)
                    added = added.movedim(1, -1)
                _write_sum(target[:, some], phase[:, some], bias, added)
    return out


def pixel_shuffle_3d(x: Tensor, out: Tensor, size: tuple[int, int, int], order: str) -> Tensor:
    """Shuffle as a copy."""
    _, _, frames, height, width = x.shape
    times, high, wide = size
    target = out.unflatten(4, (width, wide)).unflatten(3, (height, high))
    target.unflatten(2, (frames, times)).copy_(_blocks_of_pixels(x, size, order))
    return out


def average_down(x: Tensor, out: Tensor, times: int, size: int) -> Tensor:
    """Average the values of each block of frames and pixels, one frame of the result at a time."""
    channels, missing = out.shape[1], -x.shape[2] % times
    for t in range(out.shape[2]):
        first = t * times - missing  # negative: frames before the video
        block = x[:, :, max(first, 0) : first + times]
        if first < 0:
            zeros = block.new_zeros(1, 1, 1, 1, 1).expand(
                *block.shape[:2], -first, *block.shape[3:]
            )
            block = torch.cat([zeros, block], 2)
        fine = block.unflatten(4, (-1, size)).unflatten(3, (-1, size))
        fine = fine.permute(0, 3, 5, 1, 2, 4, 6).flatten(3).unflatten(3, (channels, -1))
        out[:, :, t] = fine.mean(4, dtype=widened(x)).movedim(-1, 1)
    return out


def frames_to_images(frames: Tensor, out: Tensor, patch: int, order: str) -> Tensor:
    """Convert some rows at a time, so that the whole video is never held in float32."""
    batch, _, length, height, width = frames.shape
    pixels = _blocks_of_pixels(frames, (1, patch, patch), order)[:, :, :, 0].movedim(1, -1)
    words, white = out.dtype == torch.uint16, shapes.white(out.dtype)
    # int16 of the same bits: Apple GPUs have no uint16 before PyTorch 2.9.
    target = out.view(torch.int16) if words else out
    target = target if out.ndim == 5 else target.unflatten(0, (batch, length))
    target = target.unflatten(3, (width, patch)).unflatten(2, (height, patch))

    def images(work: Tensor) -> None:
        work.add_(1).mul_(0.5).clamp_(0, 1)
        if white > 1:
            work.nan_to_num_(0).mul_(white)
        if words:  # from 2^15 on less 2^16, which is exact
            work.round_().add_(1 << 15).remainder_(1 << 16).sub_(1 << 15)

    map_blocks(images, pixels, target, wide=torch.float32)
    return out


def _blocks_of_pixels(x: Tensor, size: tuple[int, int, int], order: str) -> Tensor:
    """View the channels of `x` as blocks: `[B, C, T, t, H, h, W, w]`."""
    times, high, wide = size
    parts = {"c": x.shape[1] // (times * high * wide), "t": times, "h": high, "w": wide}
    pattern = f"b ({' '.join(order)}) T H W -> b c T t H h W w"
    return rearrange(x, pattern, **parts)


def _duplicated(x: Tensor, channels: int, phases: int, phase: int) -> Tensor:
    """Return the channels of `x` that one phase of a larger picture with `channels` repeats."""
    repeats = channels * phases // x.shape[1]
    if repeats == phases:
        return x
    if phases % repeats == 0:
        return x[:, phase // repeats :: phases // repeats]
    index = (torch.arange(channels, device=x.device) * phases + phase) // repeats
    return x.index_select(1, index)


def _write_sum(target: Tensor, x: Tensor, bias: Tensor | None, added: Tensor | None) -> None:
    """Add the given terms from left to right and round once."""
    others = [added] if added is not None else []
    if bias is not None:
        map_blocks(lambda rows, *more: [rows.add_(y) for y in (bias, *more)], x, target, *others)
    elif added is not None:
        torch.add(x, added, out=target)
    else:
        target.copy_(x)
