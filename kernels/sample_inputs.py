"""Calls of the ops as the VAEs make them, of any size: for the matrix, trials and benchmarks."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# Tensors with a number for each channel, which the ops read in float32.
_VECTORS = frozenset({"gamma", "weight", "bias", "residual_bias"})


def video(channels: int, frames: int = 1) -> Tensor:
    """Stands for `[B, C, T, H, W]` in a call that another one is to be like."""
    return torch.empty(1, channels, frames, 1, 1, device="meta")


def row(channels: int) -> Tensor:
    """Stands for `[..., C]` there, and for parameters."""
    return torch.empty(1, channels, device="meta")


# What the VAEs do most.
_USUAL: dict[str, dict[str, Any]] = {
    "rms_norm_silu": {"x": video(96), "gamma": row(96), "bias": row(96), "tail": video(96, 2)},
    "group_norm_silu": {
        "x": video(96), "weight": row(96), "bias": row(96), "groups": 32, "tail": video(96, 2),
    },
    "group_norm_statistics": {"x": video(96), "groups": 32},
    "silu_mul": {"x": row(96), "gate": row(96)},
    "bias_residual": {
        "x": video(96), "bias": row(96), "residual": video(96), "residual_bias": row(96),
    },
    "attention": {"q": row(384), "k": row(384), "v": row(384)},
    "interleave_time": {"x": video(192), "phases": 2},
    "merge_phases": {"grid": video(384), "source": video(96), "times": 2, "bias": row(96)},
    "pixel_shuffle_3d": {"x": video(12), "size": (1, 2, 2), "order": "ctwh"},
    "average_down": {"x": video(96), "channels": 192, "times": 2, "size": 2},
    "frames_to_images": {"frames": video(12), "patch": 2},
}  # fmt: skip

OPS = tuple(_USUAL)


def call(
    op: str,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the arguments of one of `OPS`, by name, the same ones each time.

    Tensors are normal numbers in channels-last memory; the activations have `size`, frames, height
    and width, and `dtype`. `given` are the arguments of another call by name, which this one is to
    be like but for its size: of its tensors the channels count, and the frames of a tail. None:
    what the VAEs do most.
    """
    given = _USUAL[op] if given is None else given
    frames, height, width = size
    times = given.get("times", 1)
    if op == "merge_phases":
        frames = max(1, frames // times) * times
    if op == "average_down":
        height, width = (side // given["size"] * given["size"] for side in (height, width))
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        x = torch.empty(shape, dtype=torch.float32, device=device)
        return x.normal_(generator=generator).to(dtype)

    def like(name: str, value: Any) -> Any:  # noqa: ANN401, whatever the op takes
        if not isinstance(value, Tensor):
            return value
        if name in _VECTORS:
            return numbers(value.numel(), dtype=torch.float32)
        if name == "statistics":  # what is not negative may be a factor too
            wide = torch.promote_types(dtype, torch.float32)
            return numbers(1, frames, 2, value.shape[-1], dtype=wide).abs_()
        if op == "attention":
            return numbers(frames, height * width, value.shape[-1])
        if op == "silu_mul":
            return numbers(frames * height * width, value.shape[-1])
        shapes = {
            "tail": (value.shape[2], height, width),
            "grid": (frames, height + 1, width + 1),
            "source": (frames // times, height, width),
        }
        shape = shapes.get(name, (frames, height, width))
        return numbers(1, *shape, value.shape[1]).movedim(-1, 1)

    made = {name: like(name, value) for name, value in given.items() if name != "out"}
    out = given.get("out")
    return made | {"dtype": out.dtype} if op == "frames_to_images" and out is not None else made


def names(function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The arguments of a call by name."""
    return inspect.signature(function).bind(*args, **kwargs).arguments


def moved_bytes(arguments: Mapping[str, Any], result: Tensor) -> int:
    """What a call has to move at least: every argument read once, every result written once.

    A tail is read and written; the statistics of a norm over frames need a second read of `x` where
    no cache holds it, which is not counted.
    """
    tail = arguments.get("tail")
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    tensors += [result] if tail is None else [result, tail]
    return sum(x.numel() * x.element_size() for x in tensors)
