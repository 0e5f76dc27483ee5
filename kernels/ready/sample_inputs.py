"""Generate calls of the ops as in the VAEs, for the matrix of backends, checks and benchmarks."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import shapes
from ..backends import SIGNATURES
from ..codes import code_steps
from ..convolution.weight import ConvWeight

# Parameters with one value per channel, which the ops read in float32.
VECTORS = frozenset({"gamma", "weight", "bias", "residual_bias"})

# Ops whose `out` can have another dtype and layout than `x`.
CONVERTING = frozenset({"frames_to_images", "pixel_shuffle_3d"})

# Height and width of the frames of a convolution: a tile is up to 256 pixels, or 128 of a row; and
# with more than this many weights per tap.
_LARGE, _SMALL, _WIDE = (7, 136), (5, 40), 1 << 16


def video(channels: int, frames: int = 1) -> Tensor:
    """Return a placeholder for `[B, C, T, H, W]` on `meta`."""
    return torch.empty(1, channels, frames, 1, 1, device="meta")


def row(channels: int) -> Tensor:
    """Return a placeholder for `[..., C]` or a parameter on `meta`."""
    return torch.empty(1, channels, device="meta")


# The most frequent calls of the VAEs; what is missing is None.
_USUAL: dict[str, dict[str, Any]] = {
    "rms_norm_silu": {
        "x": video(96), "gamma": row(96), "bias": row(96), "tail": video(96, 2), "silu": True,
        "border": 0,
    },
    "group_norm_silu": {
        "x": video(96), "weight": row(96), "bias": row(96), "tail": video(96, 2), "groups": 32,
        "eps": 1e-6, "silu": True, "border": 0,
    },
    "group_norm_statistics": {"x": video(96), "groups": 32, "eps": 1e-6},
    "silu_mul": {"x": row(96), "gate": row(96)},
    "bias_residual": {
        "x": video(96), "bias": row(96), "residual": video(96), "residual_bias": row(96),
    },
    "attention": {"q": row(384), "k": row(384), "v": row(384)},
    "interleave_time": {"x": video(192), "phases": 2},
    "merge_phases": {"grid": video(384), "source": video(96), "bias": row(96), "times": 2},
    "pixel_shuffle_3d": {"x": video(12), "size": (1, 2, 2), "order": "ctwh"},
    "average_down": {"x": video(96), "out": video(192), "times": 2, "size": 2},
    "frames_to_images": {"frames": video(12), "patch": 2, "order": "cthw"},
}  # fmt: skip

OPS = tuple(_USUAL)


def call(
    op: str,
    size: tuple[int, int, int],  # frames, height and width
    dtype: torch.dtype,
    device: torch.device,
    given: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Generate the arguments of the launches of an op, normally distributed, from a fixed seed."""
    # `given` is a call to imitate in all but its sizes and the dtype of activations; None: the most
    # frequent call.
    given = _USUAL[op] if given is None else given
    times = given.get("times", 1)
    frames, height, width = size
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
        if name in VECTORS:
            return numbers(value.numel(), dtype=value.dtype)
        if name == "statistics":  # the second half is a factor, which is not negative
            wide = torch.promote_types(dtype, torch.float32)
            return numbers(1, frames, 2, value.shape[-1], dtype=wide).abs_()
        if op == "attention":
            return numbers(frames, height * width, value.shape[-1])
        if op == "silu_mul":
            return numbers(frames * height * width, value.shape[-1])
        sizes = {
            "tail": (value.shape[2], height, width),
            "grid": (frames, height + 1, width + 1),
            "source": (frames // times, height, width),
        }
        shape = sizes.get(name, (frames, height, width))
        return numbers(1, *shape, value.shape[1]).movedim(-1, 1)

    written = ("out", "codes", "saturated")
    names = SIGNATURES[op]
    made = {n: None if n in written else like(n, given.get(n)) for n in names}
    if given.get("codes") is not None:
        made |= _coded(made, given["out"].dtype, generator)
    elif "out" in names:
        made["out"] = _target(op, made, given)
    return [made[name] for name in names]


def _target(op: str, made: Mapping[str, Any], given: Mapping[str, Any]) -> Tensor:
    """Return memory for a result, with the dtype and layout of that of `given`."""
    x, out = next(iter(made.values())), given.get("out")
    dtype = x.dtype if out is None or op not in CONVERTING else out.dtype
    shape = tuple(x.shape)
    if op == "frames_to_images":
        shape, dtype = shapes.images(x, made["patch"]), torch.float32 if out is None else dtype
    elif op == "group_norm_statistics":
        shape = shapes.statistics(x, made["groups"])
        dtype = torch.promote_types(dtype, torch.float32)
    elif op == "average_down" and out is not None:
        shape = shapes.averaged(x, out.shape[1], made["times"], made["size"])
    elif op == "merge_phases":
        shape = shapes.merged(x)
    elif op == "interleave_time":
        shape = shapes.interleaved(x, made["phases"])
    elif op == "pixel_shuffle_3d":
        shape = shapes.shuffled(x, made["size"])
    elif "border" in made:
        shape = shapes.window(x, made["tail"], made["border"])
    last = len(shape) == 5 and (out is None or out.stride(1) == 1)
    order = torch.channels_last_3d if last else torch.contiguous_format
    memory = torch.empty(shape, dtype=dtype, device=x.device, memory_format=order)
    # NaN, because all of it must be written.
    return memory.fill_(math.nan) if dtype.is_floating_point else memory


def convolution(op: str, given: Mapping[str, Any], device: torch.device) -> list[Any]:
    """Generate the arguments of the launches of a convolution like `given`, from a fixed seed."""
    # Frames are `silu` of normal numbers, as after the norms of the VAEs, and weights keep the size
    # of the results. The call has a tail, and a residual whose memory is the result.
    x, taps = given["x"], given["weight"]
    outputs, inputs, *kernel = taps.shape
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        made = torch.empty(shape, dtype=torch.float32, device=device)
        return made.normal_(generator=generator).to(dtype)

    def codes(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        info = torch.iinfo(dtype)
        made = torch.empty(shape, dtype=torch.int16, device=device)
        return made.random_(info.min, info.max + 1, generator=generator).to(dtype)

    coded = op == "int8_conv3d"
    height, width = _SMALL if inputs * outputs > _WIDE else _LARGE
    stride, padding = given.get("stride", (1, 1, 1)), given.get("padding", (0, 0))
    first = (1, *kernel)[-3] - 1
    size = 1, 2 * stride[0] + first, height, width, inputs
    made: dict[str, Any] = dict.fromkeys(SIGNATURES[op])
    if coded:
        made["x"] = codes(*size, dtype=x.dtype).movedim(-1, 1)
        weight = codes(outputs, *kernel, inputs).movedim(-1, 1)
    else:
        made["x"] = made["tail"] = F.silu(numbers(*size)).to(x.dtype).movedim(-1, 1)
        made["x"] = made["x"][:, :, first:]
        made["tail"] = made["tail"][:, :, :first] if first else None
        weight = numbers(outputs, *kernel, inputs).mul_(taps[0].numel() ** -0.5).to(x.dtype)
        weight = weight.movedim(-1, 1)
        made |= {"stride": stride, "padding": padding, "tile": given["tile"]}
    made["weight"] = ConvWeight.of(weight)
    for name in ("scale", "bias", "residual_bias", "gamma"):
        if given.get(name) is not None:
            vector = 0.1 * numbers(outputs) + (name == "gamma")
            made[name] = (vector * 1e-4 if name == "scale" else vector).to(given[name].dtype)
    shape = shapes.convolved(made["x"], taps.shape, stride, padding, made.get("tail"))
    dtype = given["dtype"] if coded else x.dtype
    if coded:
        made["dtype"] = dtype
    if dtype.is_floating_point:
        channels_last = (shape[0], *shape[2:], shape[1])
        made["residual"] = made["out"] = numbers(*channels_last, dtype=dtype).movedim(-1, 1)
    return [made[name] for name in SIGNATURES[op]]


def _coded(made: dict[str, Any], dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Return the arguments of a norm for codes of `dtype`."""
    # Large values of every eighth channel have no code, so that they are counted. The result is
    # memory of a code that few values have, because all of it must be written.
    x, info = made["x"], torch.iinfo(dtype)
    scales = (made["weight"], made["bias"]) if "weight" in made else (made["gamma"],)
    codes = code_steps(*scales).reciprocal()
    codes[::8] *= 2
    shape = shapes.window(x, made["tail"], made["border"])
    out = shapes.new_video(x.new_empty(0, dtype=dtype), shape).fill_(info.max)
    saturated = torch.zeros(2, dtype=torch.int64, device=x.device)
    more = {"out": out, "codes": codes, "saturated": saturated}
    if made["tail"] is not None:
        tail = shapes.new_video(out, made["tail"].shape)
        more["tail"] = tail.random_(info.min, info.max + 1, generator=generator)
    return more
