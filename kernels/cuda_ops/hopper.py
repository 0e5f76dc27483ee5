"""The convolution for Hopper: refusals and the launch.

It has two variants: 0 loads the pixels of a tile once per column of taps, 1 once per frame (see
`hopper_tile.py`).
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..backends import Launch
from ..constraints import UNDESCRIBED, described_strides, refuse_dtype, refuse_subclass
from ..convolution.fused import result_of
from ..convolution.weight import ConvWeight
from ..devices import device_kind
from ..errors import Refusal, first_line, is_out_of_memory, log_once
from . import runtime
from .arguments import Fields, blocks, divisor, pack_of, packed, pointer, video
from .driver import Boxes, driver
from .hopper_tile import THREADS, TILE, HopperTile, tile_of

# By dtype: the name in the instruction, and `CUtensorMapDataType`.
_KINDS = {torch.float16: ('"f16"', 6), torch.bfloat16: ('"bf16"', 9)}

# Bytes at multiples of which packs of numbers lie, and a structure with tensor maps.
_PACK, _STRUCT = 16, 64


def refuse(x: Tensor) -> None:
    """Refuse other devices and dtypes."""
    refuse_chip(x.device)
    refuse_dtype(x, tuple(_KINDS))
    if not x.numel():
        raise Refusal("the tensor is empty")


def refuse_chip(device: torch.device) -> None:
    """Refuse devices other than the chip, whose instructions no other has."""
    if device_kind(device) != "nvidia" or torch.cuda.get_device_capability(device) != (9, 0):
        raise Refusal("it needs an NVIDIA GPU of compute capability 9.0")
    runtime.refuse_device(device)


def launches() -> Mapping[str, Launch]:
    """Return the launch."""
    return {"conv3d": conv3d}


def conv3d(x: Tensor, weight: ConvWeight, *terms: Any) -> Tensor:  # noqa: ANN401
    """Convolve a video, or each of its frames, by one of the variants."""
    bias, residual, residual_bias, gamma, tail, out, stride, padding, variant = terms
    if any(step != 1 for step in stride) or variant not in (0, 1):
        raise Refusal(f"it has variants 0 and 1 at stride 1, not {variant} at {list(stride)}")
    outputs, inputs, *_ = weight.shape
    copies, norm, taps = not variant, gamma is not None, weight.plain()
    tile = tile_of(weight.kernel, inputs, outputs, copies=copies, norm=norm)
    out = result_of(x, weight, tail, out, stride, padding)
    vectors = bias, residual_bias, gamma
    # All in the dtype of `x`, or all in float32.
    same = all(each is None or each.dtype == x.dtype for each in vectors)
    dtype = x.dtype if same else torch.float32
    vectors = [None if each is None else each.to(dtype) for each in vectors]
    tensors = [each for each in (x, tail, residual, out, taps, *vectors) if each is not None]
    for each in tensors:
        refuse_subclass(each)
    packs = pack_of(x.dtype, outputs, video(out), video(residual))
    if packs == 1 or any(each.data_ptr() % _PACK for each in tensors):
        raise Refusal(UNDESCRIBED)
    batch, _, times, height, width = out.shape
    parts = outputs // tile.width, times, blocks(width, TILE), blocks(height, TILE)
    tiles, known = math.prod(parts) * batch, 0 if tail is None else tail.shape[2]
    runtime.refuse_counts(tiles, (height + TILE) * (width + TILE) * outputs)
    arguments = packed(
        *_maps(tile, x, tail, taps), video(residual), video(out),
        *map(pointer, vectors), ("I", (tiles,)), *map(divisor, parts),
        ("iiiiiii", (height, width, outputs, inputs, known, *padding)),
        ("f", (math.sqrt(outputs),)),
    )  # fmt: skip
    try:
        runtime.launch(
            "hopper_conv", "convolve_boxes", x, min(tiles, multiprocessors(x.device)), (THREADS, 1),
            arguments.ljust(blocks(len(arguments), _STRUCT) * _STRUCT, b"\0"),
            **tile.constants, KIND=_KINDS[x.dtype][0], VECTOR=runtime.NAMES[dtype],
        )  # fmt: skip
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise _refusal(error) from error
    return out


def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of `device`, each of which runs one block."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=1024)
def tensor_map(boxes: Boxes) -> bytes:
    """Return a tensor map, or refuse it with the driver's reason."""
    try:
        return driver().tensor_map(boxes)
    except (RuntimeError, AttributeError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> Refusal:
    """Log once that the driver refuses what it was asked, before anything is written."""
    reason = f"the driver refuses it ({first_line(error)})"
    log_once(f"hopper: {reason}, so other convolutions run; try another driver")
    return Refusal(reason)


def _maps(tile: HopperTile, x: Tensor, tail: Tensor | None, taps: Tensor) -> list[Fields]:
    """Return the tensor maps of the frames, of those before them, and of the weight."""
    rows, columns, slab = tile.box
    kind, swizzle, boxes = _KINDS[x.dtype][1], tile.swizzle, list[Boxes]()
    device = x.device.index or 0
    for frames in (x, x if tail is None else tail):
        strides = described_strides(frames)
        if strides is None:
            raise Refusal(UNDESCRIBED)
        sizes = tuple(frames.shape[dim] for dim in (1, 4, 3, 2, 0))
        steps = tuple(each * x.element_size() for each in reversed(strides[:-1]))
        box = slab, columns, rows, 1, 1
        boxes.append(Boxes(frames.data_ptr(), kind, sizes, steps, box, swizzle, device))
    sizes, steps = (taps[0].numel(), taps.shape[0]), (taps[0].nbytes,)
    boxes.append(Boxes(taps.data_ptr(), kind, sizes, steps, (slab, tile.width), swizzle, device))
    return [("128s", (tensor_map(each),)) for each in boxes]
