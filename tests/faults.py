"""Faults of devices, planted in the results of PyTorch's functions.

Each is one that a driver or a library has had, or of that kind: silent, and in part of a result.
A change gets the name of a function (`to host` for copies), its arguments and its result, and
returns the wrong result, or None where the fault does not show.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CONV, COPY = ("conv2d", "conv3d"), ("to host",)
# Pixels and tokens from which on libraries were wrong.
_PIXELS, _TOKENS = 1 << 16, 4096


class Fault(NamedTuple):
    """A fault of some functions, and what serves in its place."""

    names: tuple[str, ...]
    change: object  # makes the wrong result
    instead: tuple[str, ...]  # names of the fallback that is found
    dtype: torch.dtype = FP32  # of the layers


def _beyond(_, args, y):
    """Zeros after the first 65,536 pixels of a frame."""
    keeps = torch.arange(y.shape[-1] * y.shape[-2]).view(y.shape[-2:]) < _PIXELS
    return None if keeps.all() else y * keeps.to(y)


def _dropped(name, args, y):
    """The last 16 channels of a product are left out."""
    x, *others = args
    at = -1 if name == "linear" else 1
    channels = x.movedim(at, -1)
    x = torch.cat([channels[..., :-16], 0 * channels[..., -16:]], -1).movedim(-1, at)
    function = torch.nn.functional.linear if name == "linear" else getattr(torch, name)
    return function(x, *others)


def _shifted(_, args, y):
    """Stride 2 starts one pixel later."""
    strides = args[3] if len(args) > 3 else 1
    return y.roll(1, -1) if isinstance(strides, (tuple, list)) and strides[-1] == 2 else None


def _only(dtype, change):
    return lambda name, args, y: change(name, args, y) if y.dtype == dtype else None


FAULTS = {
    "conv3d: frames after the first are halved": Fault(
        ("conv3d",), lambda _, __, y: torch.cat([y[:, :, :1], y[:, :, 1:] / 2], 2), ("sliced",)),
    "conv3d: frames after the eighth": Fault(
        ("conv3d",), lambda _, __, y: torch.cat([y[:, :, :8], y[:, :, 8:] / 2], 2)
        if y.shape[2] > 8 else None, ("sliced",)),
    "conv3d: the second video": Fault(
        ("conv3d",), lambda _, __, y: torch.cat([y[:1], 0 * y[1:]]) if y.shape[0] > 1 else None,
        ("sliced",)),
    "conv3d: frames of more than 65,536 pixels": Fault(("conv3d",), _beyond, ("sliced",)),
    "conv2d: frames of more than 65,536 pixels": Fault(("conv2d",), _beyond, ("cpu",)),
    "convolutions: channels-last memory is misread": Fault(
        CONV, lambda _, args, y: None if args[0].is_contiguous() else y.roll(1, 1),
        ("contiguous",)),
    "convolutions: stride 2 is shifted": Fault(CONV, _shifted, ("cpu",)),
    "convolutions in bf16: the last 16 channels are dropped": Fault(
        CONV, _only(BF16, _dropped), ("float32",), BF16),
    "convolutions in fp16: NaN": Fault(
        CONV, _only(FP16, lambda _, __, y: y + torch.nan), ("float32",), FP16),
    "products in bf16: the last 16 channels are dropped": Fault(
        ("linear",), _only(BF16, _dropped), ("float32",), BF16),
    "products: a row of zeros": Fault(
        ("linear",), lambda _, __, y: y * (torch.arange(y.shape[-2]) != 3).to(y)[:, None],
        ("cpu",)),
    "softmax: beyond 4,096 rows": Fault(
        ("softmax",), lambda _, __, y: y * (torch.arange(y.shape[1]) < _TOKENS).to(y)[:, None],
        ("cpu",)),
    "silu: large values": Fault(("silu",), lambda _, __, y: y.clamp_(max=1), ("cpu",)),
    "copies to the host are late": Fault(
        COPY, lambda _, __, y: y.mul_(0.9) if y.is_floating_point() and y.ndim == 5 else None,
        ("cpu",), BF16),
    "copies of bytes to the host": Fault(
        COPY, lambda _, __, y: y.zero_() if y.dtype == torch.uint8 else None, ("cpu",)),
}  # fmt: skip


class Planted(TorchFunctionMode):
    """Plants a fault in the calls of this thread."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.shows = fault, 0  # how often the result was changed

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        moved = isinstance(result, Tensor) and not result.is_cuda and args[0].is_cuda
        if name in ("to", "cpu", "copy_") and isinstance(result, Tensor) and moved:
            name = "to host"
        return self.changed(name, args, result)

    def changed(self, name, args, result):
        """Return the result of a call with the fault."""
        if name not in self.fault.names:
            return result
        made = self.fault.change(name, args, result)
        self.shows += made is not None
        return result if made is None else made
