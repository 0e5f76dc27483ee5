"""Whether a device has a fast int8 convolution, with the reason if it has none."""

import functools
import importlib
import importlib.util
import time

import torch

from ..codes import ZERO
from ..convolution import onednn_int8
from ..convolution.weight import ConvWeight
from ..dispatch import ask
from . import device_kind, device_name, has_bfloat16

# The least that int8 has to gain on a CPU, over the fastest float dtype.
_GAIN = 1.15

# Channels, frames and size of the trial on a CPU, of 0.3 s. A call of 20 ms is longer than the time
# slices of a busy machine: of 8 ms, it takes as long in int8 as in bfloat16.
_CHANNELS, _FRAMES, _SIZE = 96, 3, 96


def int8_lacks(device: torch.device, dtype: torch.dtype) -> str:
    """Return why convolutions in int8 do not pay on a device; empty: they do.

    Args:
        device: The device.
        dtype: Dtype of the other layers.

    Returns:
        The reason, without a full stop.
    """
    kind = device_kind(device)
    if kind == "cpu":
        return onednn_int8.missing(device) or _slow_on_cpu(dtype)
    if kind != "nvidia":
        return f"there is no int8 convolution for {device_name(device)}"
    if importlib.util.find_spec("triton") is None:
        return "the int8 convolution of GPUs needs Triton, which is not installed"
    tiled = importlib.import_module("..triton_ops.int8_convolution", __package__)
    if not (has_bfloat16(device) and tiled.has_tiles(device)):
        return f"the int8 convolution has no tiles for {device_name(device)}"
    return ""


@functools.cache
def _slow_on_cpu(dtype: torch.dtype) -> str:
    """Time a convolution in both dtypes on this CPU, once per process."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in onednn_int8.WRITES:
        return f"oneDNN's int8 convolutions do not write {name}"
    shape = (1, _CHANNELS, _FRAMES + 2, _SIZE, _SIZE)
    order = torch.channels_last_3d
    taps = torch.ones(_CHANNELS, _CHANNELS, 3, 3, 3)
    best: dict[torch.dtype, float] = {}
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        x = torch.full(shape, ZERO, dtype=torch.uint8).contiguous(memory_format=order)
        wide = torch.ones(shape, dtype=dtype).contiguous(memory_format=order)
        weights = [_kept(taps.to(each)) for each in (torch.int8, dtype)]
        scale = torch.ones(_CHANNELS)
        calls = {
            torch.int8: lambda: ask("aten", "int8_conv3d", x, weights[0], scale, dtype=dtype),
            dtype: lambda: ask(
                "aten", "conv3d", wide, weights[1], stride=(1, 1, 1), padding=(0, 0)
            ),
        }
        for _ in range(4):
            for each, call in calls.items():
                start = time.perf_counter()
                call()
                taken = time.perf_counter() - start
                best[each] = min(best.get(each, taken), taken)
    gain = best[dtype] / best[torch.int8]
    return "" if gain >= _GAIN else f"it runs at {gain:.1f} times the speed of {name} on this CPU"


def _kept(taps: torch.Tensor) -> ConvWeight:
    plain = taps.contiguous(memory_format=torch.channels_last_3d)
    return ConvWeight(plain.shape, plain.dtype, plain.device, lambda: plain)
