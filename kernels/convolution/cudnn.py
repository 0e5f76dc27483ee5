"""Convolutions of PyTorch's library for a device: the entry point, and the size of a call.

Some versions of cuDNN were wrong for large convolutions over time in 16 bits. PyTorch 2.9 and 2.10
therefore do not pass those to cuDNN 9.10.2 to 9.14 but unfold the input, with three times the
memory and 4 to 20 times the time (pytorch/pytorch#163539, #166643, #166122, #174051). With these
versions cuDNN is called directly, and never with tensors that are too large for it.
"""

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..devices import device_kind, searches_shapes, unsearched
from ..shapes import convolved_size, new_video

# Elements of an input or output from which on 31 bits do not count them.
_LIMIT = 1 << 31

# Versions between which PyTorch does not pass such convolutions to cuDNN: major and minor of
# PyTorch, both included, and cuDNN's version, the last excluded.
_TORCH = ((2, 9), (2, 10))
_CUDNN = (91002, 91500)

# A region of an output: start and end for the batch and each dimension after the channels.
Region = tuple[tuple[int, int], ...]


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> Tensor:
    """Convolve frames or a video, in several calls if it is too large for one."""
    # At most twice as many elements as without padding.
    regions = ()
    if 2 * max(x.numel(), x.numel() // x.shape[1] * weight.shape[0]) >= _LIMIT:
        regions = parts(x.shape, weight.shape, stride, padding)
    if len(regions) < 2:
        return _call(x, weight, bias, stride, padding)
    out = new_video(x, convolved_size(x.shape, weight.shape, stride, padding))
    for region in regions:
        reads, keeps = _window(region, x.shape, weight.shape, stride, padding)
        frames, *pixels = (slice(start, end) for start, end in region)
        made = _call(x[reads], weight, bias, stride, padding)[keeps]
        out[(frames, slice(None), *pixels)] = made
    return out


def _call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> Tensor:
    switches: Any = torch.backends.cudnn
    library = F.conv2d if x.ndim == 4 else F.conv3d
    if searches_shapes(x.device):
        with unsearched(x.device):
            return library(x, weight, bias, stride, padding)
    if x.ndim == 4 or not _is_left_out(x.device, x.dtype) or not switches.enabled:
        return library(x, weight, bias, stride, padding)
    # TF32 does not affect 16 bits, and its older switch cannot be read next to the newer ones.
    flags = switches.benchmark, switches.deterministic, True
    y = torch.cudnn_convolution(x, weight, padding, stride, (1,) * len(stride), 1, *flags)
    return y if bias is None else y.add_(bias.view(-1, *[1] * len(stride)))


def parts(
    shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> list[Region]:
    """Divide an output so that each part and its input have fewer than `_LIMIT` elements."""
    # It is halved by frames while there are several, then by rows. A row is not divided.
    size = convolved_size(shape, weight_shape, stride, padding)
    whole = tuple((0, length) for length in (size[0], *size[2:]))
    if max(prod(shape), prod(size)) < _LIMIT:
        return [whole]

    def divided(region: Region) -> list[Region]:
        reads, _ = _window(region, shape, weight_shape, stride, padding)
        read = tuple(part.stop - part.start for part in reads)
        size = max(prod(read), prod(convolved_size(read, weight_shape, stride, padding)))
        axis = next((i for i, (start, end) in enumerate(region[:-1]) if end - start > 1), None)
        if size < _LIMIT or axis is None:
            return [region]
        start, end = region[axis]
        middle = (start + end) // 2
        return [
            part
            for ends in ((start, middle), (middle, end))
            for part in divided((*region[:axis], ends, *region[axis + 1 :]))
        ]

    return divided(whole)


@functools.cache
def _is_left_out(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether PyTorch would unfold a convolution over time instead of calling cuDNN."""
    if device_kind(device) != "nvidia" or dtype not in (torch.float16, torch.bfloat16):
        return False
    major, minor = torch.__version__.split(".")[:2]
    version = torch.backends.cudnn.version() if torch.version.cuda else None
    if version is None or not _TORCH[0] <= (int(major), int(minor)) <= _TORCH[1]:
        return False
    return _CUDNN[0] <= version < _CUDNN[1]


def _window(
    region: Region,
    shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the slices of the input that a region reads, and of their result that it keeps."""
    # A convolution pads both ends. Within the input that would be wrong, so enough is read to keep
    # the wrong positions out of the region.
    frames, *ends = region
    reads, keeps = [slice(*frames), slice(0, shape[1])], [slice(None), slice(None)]
    axes = zip(ends, shape[2:], weight_shape[2:], stride, padding, strict=True)
    for (start, end), length, taps, step, pad in axes:
        first = max(0, start - -(-pad // step))  # its window starts a padding earlier
        last = (end - 1) * step - pad + taps
        # The whole rest for the last output, so that a whole input stays one block of memory.
        whole = last + step > length + pad
        reads.append(slice(first * step, length if whole else min(length, last)))
        keeps.append(slice(start - first, end - first))
    return tuple(reads), tuple(keeps)
