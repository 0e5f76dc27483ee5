"""Generate calls of the ops as in the VAEs, for the matrix of backends, trials and benchmarks."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# Parameters with one value per channel, which the ops read in float32.
_VECTORS = frozenset({"gamma", "weight", "bias", "residual_bias"})


def video(channels: int, frames: int = 1) -> Tensor:
    """Return a placeholder for `[B, C, T, H, W]` with `channels` and `frames`, on `meta`."""
    return torch.empty(1, channels, frames, 1, 1, device="meta")


def row(channels: int) -> Tensor:
    """Return a placeholder for `[..., C]` or a parameter with `channels`, on `meta`."""
    return torch.empty(1, channels, device="meta")


# The most frequent calls of the VAEs.
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
    """Generate the arguments of an op, from a fixed seed.

    Activations are normally distributed and channels-last.

    Args:
        op: One of `OPS`.
        size: Frames, height and width of the activations.
        dtype: Dtype of the activations.
        device: Device of all tensors.
        given: Arguments of a call to imitate, such as `[B, C, T, H, W]` tensors: their channels,
            the frames of a tail and all other values are used, their sizes are not. None: the most
            frequent call.

    Returns:
        The arguments by name.
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
        if name == "statistics":  # the second half is a factor, which is not negative
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
    """Return the arguments `args` and `kwargs` of a call of `function` by name."""
    return inspect.signature(function).bind(*args, **kwargs).arguments


def moved_bytes(arguments: Mapping[str, Any], result: Tensor) -> int:
    """Return the bytes that a call must move: each argument read once, the result written once.

    A tail is read and written. The second read of `x` for the statistics of a norm over frames is
    not counted.

    Args:
        arguments: Arguments by name.
        result: `[...]`, the result of the call.

    Returns:
        The number of bytes.
    """
    tail = arguments.get("tail")
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    tensors += [result] if tail is None else [result, tail]
    return sum(x.numel() * x.element_size() for x in tensors)
