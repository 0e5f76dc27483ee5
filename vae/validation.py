"""Checks of the arguments of the VAE, with one line per error."""

import math
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from .models.config import MODELS, VAEConfig

# Elements that are checked at once for finite values.
_CHECKED_AT_ONCE = 1 << 24


def available_devices() -> list[str]:
    """Return the names of the CPU and of each accelerator, such as "cuda:0"."""
    found = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None:
            found += [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]
    return found


def checked_device(name: object) -> torch.device:
    """Return the device of a name; the CPU is "cpu", because PyTorch takes "cpu:0" for another."""
    there = available_devices()
    try:
        device = torch.device(name)  # type: ignore[arg-type], checked here
    except (RuntimeError, TypeError):
        message = f"device {name!r} is unknown; this PyTorch has {', '.join(there)}"
        raise ValueError(message) from None
    # A device without an index is the current one. PyTorch keeps 8 bits of an index: 256 becomes 0.
    indexed = str(name) if device.index is not None else f"{device.type}:0"
    if indexed not in there and indexed != "cpu:0":
        raise ValueError(f"device is {str(name)!r}; this PyTorch has {', '.join(there)}")
    return torch.device("cpu") if device.type == "cpu" else device


def checked_devices(devices: object) -> list[torch.device]:
    """Return the devices of a list of names, each with its index."""
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise ValueError(f"devices is {devices!r}; expected a list such as ['cuda:0', 'cuda:1']")
    found = [checked_device(each) for each in devices]
    return [each if each.type == "cpu" else torch.empty(0, device=each).device for each in found]


def checked_shares(shares: object, count: int) -> list[float] | str | None:
    """Return the shares of `count` devices: positive numbers, "memory", or None for equal ones."""
    if shares is None:
        return None
    if count < 2:
        raise ValueError(f"shares are {shares!r}; expected two devices or more before")
    if shares == "memory":
        return "memory"
    given = list(shares) if isinstance(shares, (list, tuple)) else []
    numbers = [float(each) for each in given if isinstance(each, (int, float))]
    if not len(numbers) == len(given) == count or not all(0 < each < math.inf for each in numbers):
        raise ValueError(f"shares are {shares!r}; expected {count} positive numbers or 'memory'")
    return numbers


def check_tensor(tensor: object, name: str, channels: int, sources: tuple[str, ...] = ()) -> None:
    """Check what frames and latents share: `[B, channels, T, H, W]`, not empty, no gradient."""
    # `sources` of another VAE and of another latent are for the error about the channels.
    if not isinstance(tensor, Tensor):
        kind, expected = type(tensor).__name__, f"a tensor [B, {channels}, T, H, W]"
        raise ValueError(f"{name} is a {kind}; expected {expected}")
    size = list(tensor.shape)
    if tensor.ndim != 5:
        expected = f"5, [B, {channels}, T, H, W]"
        raise ValueError(f"{name} has {tensor.ndim} dimensions, {size}; expected {expected}")
    if tensor.shape[1] != channels:
        offers = zip(sources, (tensor.shape[1], channels), strict=False)
        use = ", or ".join(f"{source} for {MODELS[n]}" for source, n in offers if n in MODELS)
        message = f"{name} has {tensor.shape[1]} channels; this VAE needs {channels}"
        raise ValueError(f"{message}: use {use}" if use else message)
    if not tensor.numel():
        raise ValueError(f"{name} is empty, {size}; expected at least one of each dimension")
    if tensor.requires_grad and torch.is_grad_enabled():
        expected = f"one without, such as {name}.detach()"
        raise ValueError(f"{name} requires a gradient; expected {expected}")


def check_latent(
    latent: Tensor, config: VAEConfig, sources: tuple[str, ...], at: int | None
) -> None:
    """Check shape, dtype and values of a latent, or of a piece of one that begins at frame `at`."""
    check_tensor(latent, "latent", config.latent_channels, sources)
    _check_count((at or 0) + latent.shape[2], config)
    if not latent.is_floating_point():
        raise ValueError(f"latent is {dtype_name(latent.dtype)}; expected a float dtype")
    check_finite(latent, "latent", at)


def check_frames(frames: Tensor, config: VAEConfig, at: int | None, *, values: bool) -> None:
    """Check shape, dtype and, unless `values` is False, values of frames."""
    check_tensor(frames, "frames", config.image_channels)
    if not frames.is_floating_point() and frames.dtype not in (torch.uint8, torch.uint16):
        expected = "a float dtype in [-1, 1], uint8 or uint16"
        raise ValueError(f"frames are {dtype_name(frames.dtype)}; expected {expected}")
    _check_count((at or 0) + frames.shape[2], config)
    step, (height, width) = config.spatial_compression, frames.shape[3:]
    if height % step or width % step:
        raise ValueError(f"frames are {height} x {width} (H x W); expected multiples of {step}")
    if values and frames.is_floating_point():
        check_finite(frames, "frames", at)


def _check_count(frames: int, config: VAEConfig) -> None:
    if config.is_of_one_frame and frames > 1:
        message = "expected 1: the weights of this VAE are of single frames"
        raise ValueError(f"got {frames} frames; {message}")


def check_range(frames: object, length: int | None) -> None:
    """Check that `frames` is a range of step 1 within `length` frames; None: of unknown length."""
    wanted = frames if isinstance(frames, range) else range(0)
    known = wanted.step == 1 and 0 <= wanted.start < wanted.stop
    if known and (length is None or wanted.stop <= length):
        return
    has = "from 0 on" if length is None else f"within 0 to {length - 1}"
    raise ValueError(f"frames are {frames!r}; expected a range {has}, of one frame or more")


def check_targets(
    latent: Tensor | None,
    config: VAEConfig,
    out: Tensor | None,
    images: Tensor | None,
    frames: range | None,
) -> None:
    """Check the buffers for frames or images; None: the length of the latent is unknown."""
    if out is not None and images is not None:
        raise ValueError("both out and images are given; expected one of them")
    for target, name in ((out, "out"), (images, "images")):
        if target is None:
            continue
        if not isinstance(target, Tensor):
            raise ValueError(f"{name} is a {type(target).__name__}; expected a tensor")
        if latent is None:
            continue
        batch, channels, length, *size = config.decoded_shape(latent.shape)
        length = length if frames is None else len(frames)
        shape = [batch, channels, length, *size]
        if name == "images":
            shape = [batch, length, *size, channels]
        if list(target.shape) != shape:
            raise ValueError(f"{name} has shape {list(target.shape)}; expected {shape}")


def check_finite(tensor: Tensor, name: str, at: int | None = None) -> None:
    """Check the values of a video, or of its piece from frame `at` on, a few frames at a time."""
    frame = max(1, tensor[:, :, :1].numel())
    # Temporary tensors must not grow with the length of the video.
    runs = tensor.split(max(1, _CHECKED_AT_ONCE // frame), dim=2)
    if all(_is_finite(run) for run in runs):
        return
    bad = torch.cat([not_finite(run) for run in runs], dim=1)
    frame, number = bad.T.nonzero()[0].tolist()
    kind = "latent frame" if name == "latent" else "frame"
    place = f"{frame} of {tensor.shape[2]}" if at is None else f"{at + frame}"
    place += f", video {number} of {len(tensor)}" if len(tensor) > 1 else ""
    raise spoiled(name, int(bad.sum()), f": {kind} {place} (from 0)")


def not_finite(frames: Tensor) -> Tensor:
    """Count the values that are NaN or infinite in each frame `[B, T]`, on their device."""
    return torch.isfinite(widened(frames)).logical_not_().sum((1, 3, 4))


def spoiled(name: str, count: int, place: str = "") -> ValueError:
    """Return the error for values that are not finite; `place`: words about the first of them."""
    maker = "a sampler or node" if name == "latent" else "another node"
    message = f"{name} has {count} values that are NaN or infinite; expected none{place}"
    return ValueError(f"{message}, made by {maker}, not the VAE")


def widened(x: Tensor) -> Tensor:
    """Convert 8-bit floats to float32, because PyTorch has few operations for them."""
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def _is_finite(run: Tensor) -> bool:
    """Return whether all values are finite, which a finite sum proves.

    The sum is fifty times as fast as a test of each value in float32, twice in bfloat16 (a CPU,
    2026-11). The sum of finite values can overflow, so the values are tested then.
    """
    run = widened(run)
    total = run.sum(dtype=torch.promote_types(run.dtype, torch.float32))
    return math.isfinite(total.item()) or bool(torch.isfinite(run).all())


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for the `dtype` `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def warn_dropped(frames: int) -> None:
    """Warn that the last `frames` were not used."""
    were = "s were" if frames > 1 else " was"
    message = f"the last {frames} frame{were} dropped; the VAE needs 4 n + 1 frames"
    warnings.warn(message, UserWarning, stacklevel=2)
