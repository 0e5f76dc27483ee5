"""Properties of a device that choices depend on."""

import functools
from dataclasses import dataclass

import torch

from .measure import seconds

# Size of the measured layer: large enough that its products dominate, small enough for a CPU.
_WIDTH, _RANK, _TOKENS = 2048, 64, 512

# If nothing can be measured: a weight is read and written twice, as by `torch.addmm`.
_UNMEASURED = 4.0


@dataclass(frozen=True)
class GPUConfig:
    """Properties of one device and dtype.

    Attributes:
        name: Name of the device.
        capability: CUDA compute capability, such as `(9, 0)`; None: not a CUDA device.
        dtype: Dtype of the products.
        products_per_s: Multiply-adds per second of a large product, measured; 0: not measured.
        stream_c: `c` in `tokens > c * in * out / (in + 2 * out)`, measured. Above it, adding a LoRA
            to the weight is faster than adding it to the output.
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


@functools.cache
def gpu_config(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> GPUConfig:
    """Measure `device` with `dtype`, once per process: some ms on a GPU, up to 1 s on a CPU."""
    name, capability = device.type, None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    try:
        rate, c = _measured(device, dtype)
    except RuntimeError:  # the device does not support the dtype, or memory is short
        rate, c = 0.0, _UNMEASURED
    reduced, reason = False, "as always on this device"
    if device.type == "cuda":
        reduced = bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)
        reason = "PyTorch's current setting"
    native = capability is not None and capability >= (8, 9)
    return GPUConfig(name, capability, dtype, rate, c, native, reduced, reason)


def _measured(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return multiply-adds per second, and `stream_c`."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight, x = made(_WIDTH, _WIDTH), made(_TOKENS, _WIDTH)
    down, up = made(_RANK, _WIDTH), made(_WIDTH, _RANK)
    with torch.inference_mode():
        y = x @ weight.T
        calls = {
            "product": lambda: torch.mm(x, weight.T, out=y),
            "stream": lambda: torch.addmm(weight, up, down),
            "bypass": lambda: y.addmm_(x @ down.T, up.T),
        }
        taken = seconds(calls, device, launches=True, repeats=1)
    tokens = _TOKENS * taken["stream"] / taken["bypass"]
    return _TOKENS * _WIDTH * _WIDTH / taken["product"], tokens * 3 / _WIDTH
