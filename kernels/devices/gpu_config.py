"""Properties of a device that choices depend on."""

import logging
import threading
from dataclasses import dataclass

import torch

from ..errors import first_line
from . import amd_chip, device_kind, device_name

_logger = logging.getLogger(__name__)

# AMD chips that multiply fp8: MI300, MI350, RX 9000.
_FP8 = ("gfx942", "gfx950", "gfx1200", "gfx1201")

_lock = threading.Lock()
_known: dict[tuple[torch.device, torch.dtype], "GPUConfig"] = {}


@dataclass(frozen=True)
class GPUConfig:
    """Properties of one device and dtype.

    Attributes:
        name: Name of the device.
        capability: Compute capability, such as `(9, 0)`; None: not an NVIDIA GPU.
        dtype: Dtype of the products.
        products_per_s: Multiply-adds per second of a large product, measured, to two digits; 0: not
            measured.
        stream_c: `c` in `tokens > c * in * out / (in + 2 * out)`, measured, a power of two. Above
            it, adding a LoRA to the weight is faster than adding it to the output.
        native_fp8: The device multiplies fp8 directly.
        reduced_precision: Sums of bf16 products may be less precise than float32.
        reason: The reason for `reduced_precision`.
    """

    name: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    products_per_s: float
    stream_c: float
    native_fp8: bool
    reduced_precision: bool
    reason: str

    def lines(self) -> list[str]:
        """Return the properties as lines of text."""
        capability = "none" if self.capability is None else ".".join(map(str, self.capability))
        rate = "not measured"
        if self.products_per_s:
            rate = f"{2 * self.products_per_s / 1e12:.2f} TFLOPS, measured"
        reductions = "reduced" if self.reduced_precision else "in float32"
        return [
            f"{self.name}, compute capability {capability}",
            f"{str(self.dtype).removeprefix('torch.')} products: {rate}",
            f"fp8 products: {'yes' if self.native_fp8 else 'no'}",
            f"LoRA mode auto: stream from {self.stream_c:.2f} * in * out / (in + 2 out) tokens",
            f"sums of bf16 products: {reductions}, {self.reason}",
        ]


def gpu_config(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> GPUConfig:
    """Return the properties of `device` for products of `dtype`.

    They are measured once and kept on disk (`probes.store`), so that the next process takes the
    same decisions. A device that cannot be measured is tried again by the next process.

    Args:
        device: The device.
        dtype: Dtype of the products.

    Returns:
        The properties, the same object in each call of a process.
    """
    config = _known.get((device, dtype))
    if config is None:
        with _lock:  # probes at the same time would disturb one another
            config = _known.get((device, dtype))
            if config is None:
                config = _known[device, dtype] = _described(device, dtype)
    return config


def _described(device: torch.device, dtype: torch.dtype) -> GPUConfig:
    from ..probes import store  # noqa: PLC0415, few processes ask
    from ..probes.probe import DTYPES, UNMEASURED_C, measured  # noqa: PLC0415

    name, capability, kind = device_name(device), None, device_kind(device)
    if kind == "nvidia":
        capability = torch.cuda.get_device_capability(device)
    rate, c = 0.0, UNMEASURED_C
    if dtype in DTYPES and device.type != "meta":
        try:
            found = store.kept(device, dtype, lambda: measured(device, dtype))
            rate, c = found.products_per_s, found.stream_c
        except (RuntimeError, TypeError, MemoryError) as error:
            _logger.debug("%s is not measured in %s: %s", name, dtype, first_line(error))
    reduced, reason = False, "as always on this device"
    if kind in ("nvidia", "amd"):
        reduced = bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)
        reason = "PyTorch's current setting"
    native = capability >= (8, 9) if capability else kind == "amd" and amd_chip(device) in _FP8
    return GPUConfig(name, capability, dtype, rate, c, native, reduced, reason)
