"""Generate calls of the ops as in the VAEs, for the matrix of backends, checks and benchmarks."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import shapes
from ..codes import code_dtype, code_steps
from ..convolution.weight import ConvWeight

# Parameters with one value per channel, which the ops read in float32.
VECTORS = frozenset({"gamma", "weight", "bias", "residual_bias"})

# Tensors that a call can omit without another kernel of a backend, by op. `merge_phases` moves bits
# without a bias and `group_norm_silu` measures without statistics, so these are not here.
OPTIONAL = {
    "rms_norm_silu": ("bias", "tail"),
    "group_norm_silu": ("tail",),
    "bias_residual": ("bias", "residual", "residual_bias"),
}

# Ops whose `out` can have another dtype and layout than `x`.
CONVERTING = frozenset({"frames_to_images", "pixel_shuffle_3d"})

# Height and width of the frames of a convolution: a tile is up to 256 pixels, or 128 of a row; and
# with more than this many weights per tap.
_LARGE, _SMALL, _WIDE = (7, 136), (5, 40), 1 << 16

# Frames of a tail: the context of a convolution with three temporal taps.
_CONTEXT = 2


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
    """Generate the arguments of an op, normally distributed, from a fixed seed."""
    # `size` has frames, height and width. `given` is a call to imitate in all but its sizes and the
    # dtype of activations; None: the most frequent call.
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
        if name in VECTORS:
            return numbers(value.numel(), dtype=value.dtype)
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

    written = ("out", "codes", "saturated")
    made = {name: like(name, value) for name, value in given.items() if name not in written}
    return made | _target(op, made, given, generator)


def convolution(op: str, given: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Generate the arguments of a convolution like `given`, from a fixed seed."""
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
    frames = 2 * given.get("stride", (1,))[0]
    first = 0 if op == "conv2d" else kernel[0] - 1
    made: dict[str, Any] = {}
    if coded:
        made["x"] = codes(1, frames + first, height, width, inputs, dtype=x.dtype).movedim(-1, 1)
        weight = codes(outputs, *kernel, inputs).movedim(-1, 1)
    else:
        size = (2,) if op == "conv2d" else (1, frames + first)
        video = F.silu(numbers(*size, height, width, inputs)).to(x.dtype).movedim(-1, 1)
        made["x"] = video
        if op == "conv3d" and first:
            made["tail"], made["x"] = video[:, :, :first], video[:, :, first:]
        weight = numbers(outputs, *kernel, inputs).mul_(taps[0].numel() ** -0.5).to(x.dtype)
        weight = weight.movedim(-1, 1)
        made |= {"stride": given["stride"], "padding": given["padding"]}
    made["weight"] = ConvWeight.of(weight)
    for name in ("scale", "bias", "residual_bias", "gamma"):
        if given.get(name) is not None:
            vector = 0.1 * numbers(outputs) + (name == "gamma")
            made[name] = (vector * 1e-4 if name == "scale" else vector).to(given[name].dtype)
    stride = given.get("stride", (1,) * len(kernel))
    padding = given.get("padding", (0, 0))
    shape = shapes.convolved(made["x"], taps.shape, stride, padding, made.get("tail"))
    dtype = given["dtype"] if coded else x.dtype
    if dtype.is_floating_point:
        channels_last = (shape[0], *shape[2:], shape[1])
        made["residual"] = made["out"] = numbers(*channels_last, dtype=dtype).movedim(-1, 1)
    return made | ({"dtype": dtype} if coded else {})


def coded_dtype(device: torch.device, given: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the codes that a call with `codes` writes: that of `out`, if given."""
    out: Tensor | None = given.get("out")
    return code_dtype(device) if out is None else out.dtype


def _coded(made: dict[str, Any], dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Return the arguments of a norm for codes of `dtype`."""
    # Large values of every eighth channel have no code, so that they are counted. The result is
    # memory of a code that few values have, because all of it must be written.
    x, info = made["x"], torch.iinfo(dtype)
    scales = (made["weight"], made["bias"]) if "weight" in made else (made["gamma"],)
    codes = code_steps(*scales).reciprocal()
    codes[::8] *= 2
    shape = shapes.window(x, made.get("tail"), made.get("border", 0))
    out = shapes.new_video(x.new_empty(0, dtype=dtype), shape).fill_(info.max)
    saturated = torch.zeros(2, dtype=torch.int64, device=x.device)
    more = {"out": out, "codes": codes, "saturated": saturated}
    if made.get("tail") is not None:
        tail = shapes.new_video(out, made["tail"].shape)
        more["tail"] = tail.random_(info.min, info.max + 1, generator=generator)
    return more


def _target(
    op: str, made: dict[str, Any], given: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Any]:
    """Return the arguments for a result with the dtype and layout of that of `given`, if any."""
    # A result with a border is memory of NaN, because all of it must be written.
    out: Tensor | None = given.get("out")
    if given.get("codes") is not None:
        return _coded(made, coded_dtype(generator.device, given), generator)
    if made.get("border"):
        window = shapes.new_window(made["x"], made.get("tail"), made["border"])
        return {"out": window.fill_(math.nan)}
    if out is None or op not in CONVERTING:
        return {}
    if op == "frames_to_images":
        return {"dtype": out.dtype}
    x, order = made["x"], torch.contiguous_format
    if out.stride(1) == 1:
        order = torch.channels_last_3d
    shape = shapes.shuffled(x, made["size"])
    return {"out": torch.empty(shape, dtype=out.dtype, device=x.device, memory_format=order)}


def forms(op: str, given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a call with all optional tensors, and as it is if it lacks some."""
    missing = [name for name in OPTIONAL.get(op, ()) if given.get(name) is None]
    if not missing:
        return [given]
    x: Tensor = given["x"]
    vectors = (each for name, each in given.items() if name in VECTORS and each is not None)
    dtype = next(vectors, x).dtype
    added = {
        name: row(x.shape[1]).to(dtype) if name in VECTORS else video(x.shape[1], _CONTEXT)
        for name in missing
    }
    return [{**given, **added}, given]
