"""Convolutions as the vendor's library takes them: which entry, and how much in a call.

Some versions of cuDNN were wrong for large convolutions over time in 16 bits. PyTorch 2.9 and 2.10
therefore give those not to cuDNN 9.10.2 to 9.14 but to a path of their own that unfolds the input:
three times the memory, 4 to 20 times the time (pytorch/pytorch#163539, #166643, #166122, #174051).
There cuDNN is called directly, and never with what is too large for it.
"""

import functools
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .conv_weights import output_size

# Elements of an input or output from which on 31 bits no longer count them.
_LIMIT = 1 << 31

# Versions between which PyTorch does not give such convolutions to cuDNN: the first two numbers of
# PyTorch's, both included, and cuDNN's, the last excluded.
_TORCH = ((2, 9), (2, 10))
_CUDNN = (91002, 91500)

# A region of an output: first index and end for the batch and each dimension behind the channels.
Region = tuple[tuple[int, int], ...]

# Chunks of a kind that go by without a search. It takes about as long as they do: some algorithms
# for each of the shapes in a chunk. So what ends before has lost nothing, and what goes on has lost
# as much again at most.
_UNSEARCHED = 8

_searching: ContextVar[bool] = ContextVar("searching", default=False)
_lock = threading.Lock()
_seen: Counter[Hashable] = Counter()


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> Tensor:
    """Convolve frames or a video, in as many calls as it takes.

    Args:
        x: `[N, C_in, H, W]` or `[B, C_in, T, H, W]`, channels-last.
        weight: `[C_out, C_in, ...]`, of the dtype of `x`.
        bias: `[C_out]`, likewise; None: zeros.
        stride: Steps in each dimension of the kernel.
        padding: Zeros at both ends of each.
    """
    regions = parts(x.shape, weight.shape, stride, padding)
    if len(regions) == 1:
        return _call(x, weight, bias, stride, padding)
    out = torch.empty(
        output_size(x.shape, weight.shape, stride, padding),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d,
    )
    for region in regions:
        reads, keeps = _window(region, x.shape, weight.shape, stride, padding)
        frames, *pixels = (slice(start, end) for start, end in region)
        out[(frames, slice(None), *pixels)] = _call(x[reads], weight, bias, stride, padding)[keeps]
    return out


def parts(
    shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> list[Region]:
    """Divide an output so that neither it nor what it reads is `_LIMIT` elements or more.

    It is halved by frames as long as there are several, and then by rows. A row is never divided.
    """
    size = output_size(shape, weight_shape, stride, padding)
    whole = tuple((0, length) for length in (size[0], *size[2:]))
    if max(prod(shape), prod(size)) < _LIMIT:
        return [whole]

    def divided(region: Region) -> list[Region]:
        reads, _ = _window(region, shape, weight_shape, stride, padding)
        read = tuple(part.stop - part.start for part in reads)
        size = max(prod(read), prod(output_size(read, weight_shape, stride, padding)))
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


def pays(kind: Hashable) -> bool:
    """Count a chunk, and tell whether it is time to search for what chunks like it do.

    Its kind is what decides the shapes, dtypes and device of its convolutions.
    """
    with _lock:
        _seen[kind] += 1
        return _seen[kind] > _UNSEARCHED


@contextmanager
def searching(device: torch.device) -> Iterator[None]:
    """Let cuDNN time its algorithms on a CUDA device once for each new shape in the body.

    It is what `torch.backends.cudnn.benchmark` switches on for a process. Here it is an argument of
    our own calls, in this thread: nobody else's convolutions see it, and there is nothing to put
    back. Of 16 bits alone: PyTorch keeps a plan for each shape, searched for or not, and what tells
    ours from those that were not is that they are deterministic, which float32's may not all be.
    """
    token = _searching.set(device.type == "cuda")
    try:
        yield
    finally:
        _searching.reset(token)


def _call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> Tensor:
    switches: Any = torch.backends.cudnn
    searches = _searching.get() and _is_direct(x.device, x.dtype)
    direct = searches or (x.ndim == 5 and _is_left_out(x.device, x.dtype))
    if not direct or not switches.enabled:
        return (F.conv2d if x.ndim == 4 else F.conv3d)(x, weight, bias, stride, padding)
    # TF32 is no matter of 16 bits, and its older switch cannot be read beside the newer ones.
    y = torch.cudnn_convolution(
        x,
        weight,
        padding,
        stride,
        (1,) * len(stride),
        1,
        searches or switches.benchmark,
        searches or switches.deterministic,
        True,
    )
    return y if bias is None else y.add_(bias.view(-1, *[1] * len(stride)))


@functools.cache
def _is_left_out(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch would unfold a convolution over time rather than ask cuDNN."""
    return _is_direct(device, dtype) and _unfolds(torch.__version__, _cudnn_version())


@functools.cache
def _is_direct(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether cuDNN can be called directly for these."""
    narrow = dtype in (torch.float16, torch.bfloat16)
    return device.type == "cuda" and narrow and _cudnn_version() is not None


def _cudnn_version() -> int | None:
    """As one number; None: there is none, as on AMD's devices, which are called CUDA too."""
    return torch.backends.cudnn.version() if torch.version.cuda else None


def _unfolds(torch_version: str, cudnn_version: int | None) -> bool:
    """Whether these two versions are among those that do not work together."""
    major, minor = torch_version.split(".")[:2]
    if cudnn_version is None or not _TORCH[0] <= (int(major), int(minor)) <= _TORCH[1]:
        return False
    return _CUDNN[0] <= cudnn_version < _CUDNN[1]


def _window(
    region: Region,
    shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """What a region reads of the input, and what of the result of that, padded too, it is.

    A convolution pads both ends. Inside of the input that would be wrong, so as much is read there
    as keeps the wrong positions out of the region.
    """
    frames, *ends = region
    reads, keeps = [slice(*frames), slice(0, shape[1])], [slice(None), slice(None)]
    axes = zip(ends, shape[2:], weight_shape[2:], stride, padding, strict=True)
    for (start, end), length, taps, step, pad in axes:
        first = max(0, start - -(-pad // step))  # the output whose window begins a pad before
        last = (end - 1) * step - pad + taps
        # All of it for the last output, so that what is whole stays one run of memory.
        whole = last + step > length + pad
        reads.append(slice(first * step, length if whole else min(length, last)))
        keeps.append(slice(start - first, end - first))
    return tuple(reads), tuple(keeps)
