"""Whether a device has a fast int8 convolution, with the reason if it has none."""

import importlib
import importlib.util

import torch

from ..convolution import onednn
from . import device_kind, device_name, has_bfloat16


def int8_lacks(device: torch.device, dtype: torch.dtype) -> str:
    """Return why convolutions in int8 do not pay next to layers in `dtype`; "": they do."""
    kind = device_kind(device)
    if kind == "cpu":
        # With VNNI or AMX four products of int8 take one instruction: bfloat16 takes 1.38 times as
        # long (`tests/benchmarks/LOG.md`), and float32 longer.
        written = dtype in onednn.WRITES
        name = str(dtype).removeprefix("torch.")
        reason = "" if written else f"oneDNN's int8 convolutions do not write {name}"
        return onednn.missing(device) or reason
    if kind != "nvidia":
        return f"there is no int8 convolution for {device_name(device)}"
    if importlib.util.find_spec("triton") is None:
        return "the int8 convolution of GPUs needs Triton, which is not installed"
    tiled = importlib.import_module("..triton_ops.int8_convolution", __package__)
    if not (has_bfloat16(device) and tiled.has_tiles(device)):
        return f"the int8 convolution has no tiles for {device_name(device)}"
    return ""
