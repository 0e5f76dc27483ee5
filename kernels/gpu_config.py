"""What a device is and does, in the few numbers that choices are made by."""

import functools
from dataclasses import dataclass

import torch

from .measure import seconds

# Of the layer that is measured: large enough for its products to be what takes the time, small
# enough to be soon over on a CPU.
_WIDTH, _RANK, _TOKENS = 2048, 64, 512

# Where nothing can be measured: a weight read and written twice, as `torch.addmm` does.
_UNMEASURED = 4.0


@dataclass(frozen=True)
class GPUConfig:
    """One device and dtype.

    Attributes:
        capability: CUDA compute capability, such as `(9, 0)`; None: there is none.
        products_per_s: Multiply-adds of a large product, measured; 0: not measured.
        stream_c: `c` in `tokens > c * in * out / (in + 2 * out)`, from which on a LoRA is better
            added to the weight than to the output; measured.
        native_fp8: The device multiplies fp8 as it is.
        reduced_precision: Products of bf16 may be summed in less than float32.
        reason: Why they may, or may not.
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
        """The same, in words."""
        capability = "none" if self.capability is None else ".".join(map(str, self.capability))
        rate = "not measured"
        if self.products_per_s:
            rate = f"{2 * self.products_per_s / 1e12:.2f} TFLOPS, measured"
        reductions = "reduced" if self.reduced_precision else "in float32"
        return [
            f"{self.name}, compute capability {capability}",
            f"{str(self.dtype).removeprefix('torch.')} products: {rate}",
            f"fp8 products: {'yes' if self.native_fp8 else 'no'}",
            f"LoRA into the weight from {self.stream_c:.2f} * in * out / (in + 2 out) tokens on",
            f"sums of bf16 products: {reductions}, {self.reason}",
        ]


@functools.cache
def gpu_config(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> GPUConfig:
    """Measure a device, once in a process; it takes some ms on a GPU, up to a second on a CPU."""
    name, capability = device.type, None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    try:
        rate, c = _measured(device, dtype)
    except RuntimeError:  # a dtype that the device cannot multiply, or no memory
        rate, c = 0.0, _UNMEASURED
    reduced, reason = False, "as this device always does"
    if device.type == "cuda":
        reduced = bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)
        reason = "as PyTorch is set, until a GPU has shown what the other is worth"
    native = capability is not None and capability >= (8, 9)
    return GPUConfig(name, capability, dtype, rate, c, native, reduced, reason)


def _measured(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Multiply-adds per second, and the tokens at which both ways take as long, as `c`."""
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
