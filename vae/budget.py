"""How long the steps of a stream are: from the frame's size and the memory that there is."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch

from .conv import Conv
from .network import Network, sublayers

# On a CPU an activation of this size stays in the last cache, and in memory that malloc hands out
# again rather than map anew (glibc maps blocks over 32 MB afresh, at about the cost of the
# convolution that fills them).
_CPU_PART_BYTES = 24 << 20

# Elsewhere, large enough to fill the device, small enough to leave memory to others.
_DEVICE_PART_BYTES = 1 << 30

# Activations that are alive at once: the residual, a convolution's result, its window, and of every
# stage above what waits for its turn; and what a process takes whatever the size. Fitted to the
# peak of the process for 17 frames and for one, encoding and decoding, at 256 x 256 (widths 24 and
# 96), 480 x 832 and 720 x 1280 (width 24) on two cores, 2026-11: the estimates of videos are 1 %
# below to 40 % above what was seen, those of pictures up to 60 MB above.
_ALIVE = 7
_ALIVE_LONE = 3
_BASE_BYTES = 64 << 20

# At the frames' own size, after all temporal upsampling.
_FRAMES_PER_LATENT = 4

# More latents per step than this gained nothing that was measured, and delay the first frames.
_MOST_LATENTS = 4


@dataclass(frozen=True)
class Plan:
    """The steps of one stream.

    Attributes:
        chunk: Latents per step.
        part_bytes: Size of an activation above which its frames go on in parts.
        peak_bytes: Memory that the stream takes beside weights, input and output; an estimate.
    """

    chunk: int
    part_bytes: int
    peak_bytes: int


def make_plan(
    network: Network,
    latent_size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    limit_bytes: int | None = None,
    *,
    lone: bool = False,
) -> Plan:
    """Choose the steps of a stream.

    Args:
        network: The encoder or the decoder.
        latent_size: Batch, height and width of the latents.
        dtype: Of the activations.
        device: Where they live.
        limit_bytes: Memory that the stream may take; None: half of what is free.
        lone: The video is a single frame.

    Returns:
        The longest steps that stay within the limit. Where nothing does, the shortest.
    """
    batch, height, width = latent_size
    pixel_bytes = batch * height * width * dtype.itemsize
    sizes = list(_layer_sizes(network))
    tails = 0 if lone else int(sum(size.tail for size in sizes) * pixel_bytes)
    frame = int(max(size.activation for size in sizes) * pixel_bytes)
    limit = _free_bytes(device) // 2 if limit_bytes is None else limit_bytes
    room = limit - tails - _BASE_BYTES
    most = _CPU_PART_BYTES if device.type == "cpu" else _DEVICE_PART_BYTES
    part = max(1, min(most, room // _ALIVE))
    # One latent in the layers that work at its size, or where its frames come together again.
    latent = max(size.activation / size.area for size in sizes)
    joined = max((size.joined for size in sizes), default=Fraction(0))
    chunk = max(1, min(_MOST_LATENTS, part // int(max(latent, joined) * pixel_bytes)))
    if lone:
        return Plan(1, part, _BASE_BYTES + _ALIVE_LONE * frame)
    largest = max(frame, min(part, chunk * _FRAMES_PER_LATENT * frame))
    together = 2 * chunk * int(joined * pixel_bytes)  # the runs, and the copy that joins them
    return Plan(chunk, part, _BASE_BYTES + tails + _ALIVE * largest + together)


@dataclass(frozen=True)
class _LayerSize:
    """Of one layer, in elements per pixel of the latent.

    Attributes:
        activation: A frame.
        tail: The frames that its convolutions remember.
        area: Pixels of a frame.
        joined: The frames of one latent, where they are collected before the layer; else 0.
    """

    activation: Fraction
    tail: Fraction
    area: Fraction
    joined: Fraction


def _layer_sizes(network: Network) -> Iterator[_LayerSize]:
    """Walk the layers in order, with the size of the frames that they see."""
    chains = network.chains()
    heads = [sublayers(chain[0])[0] for chain in chains[1:]]
    layers = [part for chain in chains for layer in chain for part in sublayers(layer)]
    shrinks = sum(getattr(layer, "scale", 1) < 1 for layer in layers)
    area = Fraction(4**shrinks)
    frames = _FRAMES_PER_LATENT
    for layer in layers:
        before, area = area, area * getattr(layer, "scale", Fraction(1)) ** 2
        convs = [module for module in layer.modules() if isinstance(module, Conv)]
        widest = max((max(conv.weight.shape[:2]) for conv in convs), default=0)
        # Wan's time_conv works on the small side of a resampling.
        large = getattr(layer, "remembers_large", False)
        seen = max(before, area) if large else min(before, area)
        tail = sum(conv.context * conv.weight.shape[1] for conv in convs)
        joined = Fraction(0)
        if layer in heads:
            joined = frames * before * convs[0].weight.shape[1]
            frames //= 2
        yield _LayerSize(max(before, area) * widest, seen * tail, max(before, area), joined)


def _free_bytes(device: torch.device) -> int:
    """Memory that is free on a device; a small guess where it cannot be asked."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def largest_part(frames: int, nbytes: int, part_bytes: int) -> int:
    """The most frames of an activation that go on together, such that all parts have one shape.

    Args:
        frames: Frames that there are.
        nbytes: Their size.
        part_bytes: The size that a part should not exceed.

    Returns:
        A divisor of `frames`; 1 where even one frame is larger.
    """
    if nbytes <= part_bytes:
        return frames
    most = max(1, part_bytes * frames // nbytes)
    return max(part for part in range(1, most + 1) if frames % part == 0)
