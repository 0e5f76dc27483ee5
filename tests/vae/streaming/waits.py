"""Counts the reads of results, for which a host waits."""

import torch
from torch.overrides import TorchFunctionMode

_READS = {"tolist", "item", "__bool__", "__int__", "__float__", "equal"}


class Waits(TorchFunctionMode):
    """Counts the reads of tensors on `device`, within its block."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.count, self._device = 0, device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in _READS:
            self.count += isinstance(args[0], torch.Tensor) and args[0].device.type == self._device
        return func(*args, **(kwargs or {}))
