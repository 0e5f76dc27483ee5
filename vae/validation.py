"""What callers hand in: checked with one line per error, and brought to the network's layout."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from .models.config import VAEConfig

# Elements whose finiteness is asked for together.
_CHECKED_AT_ONCE = 1 << 24


def check_tensor(tensor: object, name: str, channels: int) -> None:
    """Check what frames and latents have in common."""
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}; expected a tensor [B, {channels}, T, H, W]"
        )
    if tensor.ndim != 5:
        raise ValueError(
            f"{name} has {tensor.ndim} dimensions, {list(tensor.shape)}; "
            f"expected 5, [B, {channels}, T, H, W]"
        )
    if tensor.shape[1] != channels:
        raise ValueError(f"{name} has {tensor.shape[1]} channels; this VAE needs {channels}")
    if not tensor.numel():
        raise ValueError(
            f"{name} is empty, {list(tensor.shape)}; expected at least one of each dimension"
        )


def check_latent(latent: Tensor, config: VAEConfig) -> None:
    """Check what is to be decoded."""
    check_tensor(latent, "latent", config.latent_channels)
    if not latent.is_floating_point():
        raise ValueError(f"latent is {dtype_name(latent.dtype)}; expected a float dtype")
    check_finite(latent, "latent")


def check_frames(frames: Tensor, config: VAEConfig) -> None:
    """Check what is to be encoded."""
    check_tensor(frames, "frames", config.image_channels)
    if not frames.is_floating_point() and frames.dtype != torch.uint8:
        raise ValueError(
            f"frames are {dtype_name(frames.dtype)}; expected a float dtype in [-1, 1] or uint8"
        )
    step = config.spatial_compression
    if frames.shape[3] % step or frames.shape[4] % step:
        raise ValueError(
            f"frames are {frames.shape[3]} x {frames.shape[4]} (H x W); "
            f"expected multiples of {step}"
        )
    if frames.is_floating_point():
        check_finite(frames, "frames")


def checked(pieces: Tensor | Iterable[Tensor], check: Callable[[Tensor], None]) -> Iterator[Tensor]:
    """The pieces of a video, checked: a tensor at once, an iterable's when they are reached."""
    if isinstance(pieces, Tensor) or not isinstance(pieces, Iterable):
        check(pieces)
        return iter([pieces])

    def each() -> Iterator[Tensor]:
        first: Tensor | None = None
        for piece in pieces:
            check(piece)
            if first is None:
                first = piece
            elif piece.shape[:2] != first.shape[:2] or piece.shape[3:] != first.shape[3:]:
                raise ValueError(
                    f"a piece has shape {list(piece.shape)}; expected {list(first.shape)} "
                    "as the first, but for its frames"
                )
            yield piece

    return each()


def check_range(frames: object, length: int | None) -> None:
    """Check the frames that are wanted of a video; None: nobody knows its length."""
    wanted = frames if isinstance(frames, range) else range(0)
    known = wanted.step == 1 and 0 <= wanted.start < wanted.stop
    if known and (length is None or wanted.stop <= length):
        return
    has = "from 0 on" if length is None else f"within 0 to {length - 1}"
    raise ValueError(f"frames are {frames!r}; expected a range {has}, of one frame or more")


def check_targets(
    latent: Tensor | Iterable[Tensor],
    config: VAEConfig,
    out: Tensor | None,
    images: Tensor | None,
    frames: range | None,
) -> None:
    """Check the memory that frames or images go to; of an iterable nobody knows the length."""
    for target, name in ((out, "out"), (images, "images")):
        if target is None:
            continue
        if not isinstance(target, Tensor):
            raise ValueError(f"{name} is a {type(target).__name__}; expected a tensor")
        if not isinstance(latent, Tensor):
            continue
        batch, channels, length, *size = config.decoded_shape(latent.shape)
        length = length if frames is None else len(frames)
        shape = [batch, channels, length, *size]
        if name == "images":
            shape = [batch, length, *size, channels]
        if list(target.shape) != shape:
            raise ValueError(f"{name} has shape {list(target.shape)}; expected {shape}")


def check_finite(tensor: Tensor, name: str) -> None:
    """Check that all of `[B, C, T, H, W]` is finite, a few frames at a time."""
    frame = max(1, tensor[:, :, :1].numel())
    # What is made of a long video to check it must not be as long.
    runs = tensor.split(max(1, _CHECKED_AT_ONCE // frame), dim=2)
    if all(_sums_up(run) or bool(torch.isfinite(run).all()) for run in runs):
        return
    bad = sum(run.numel() - int(torch.isfinite(run).sum()) for run in runs)
    raise ValueError(f"{name} has {bad} values that are NaN or infinite; expected finite ones")


def _sums_up(run: Tensor) -> bool:
    """Whether the sum is finite, which it is with no NaN and nothing infinite in it.

    Fifty times as fast as to ask each number in float32, twice in bfloat16 (a CPU, 2026-11). The
    sum of finite numbers may overflow, too, so that a False is to be looked into.
    """
    wide = torch.promote_types(run.dtype, torch.float32)
    return bool(torch.isfinite(run.sum(dtype=wide)))


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
