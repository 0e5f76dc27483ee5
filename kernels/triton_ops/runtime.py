"""Whether Triton works on a device, tested once, and the launch of a kernel."""

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..backends import TRIED, forced
from ..constraints import refuse_old_bfloat16
from ..devices import current, device_kind
from ..errors import Refusal, first_line, is_out_of_memory, log_once

# The reason why Triton does not work on a device; "" where it works.
_found: dict[torch.device, str] = {}

# Variants of kernels that could not be compiled or launched on a device, with the reason.
_broken: dict[tuple[Any, ...], str] = {}

# A grid has up to 2^31 - 1 programs along its first axis, and this many along the others.
GRID_LIMIT = 65535


def interpreted() -> bool:
    """Return whether Triton's interpreter replaces the compiler."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refuse_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse devices other than GPUs that support the dtype, before Triton is imported."""
    # The interpreter also runs on the CPU, hundreds of times slower than the reference. It exists
    # to test the kernels and only runs if this backend is selected by name.
    interprets, asked = interpreted(), forced() == "triton"
    on_cpu = interprets and asked and device.type == "cpu"
    if device_kind(device) not in TRIED and not on_cpu:
        raise Refusal(f"the tensors are on {device.type}; triton needs an NVIDIA, AMD or Intel GPU")
    if interprets and not asked:
        raise Refusal("TRITON_INTERPRET=1 replaces the compiler by an interpreter")
    if not asked and os.environ.get("FAST_VIDEO_VAE_TRITON") == "0":
        raise Refusal("FAST_VIDEO_VAE_TRITON=0 disables it")
    refuse_old_bfloat16(device, dtype)


def require(device: torch.device) -> None:
    """Check once per device that Triton compiles and runs a trivial kernel, or refuse."""
    # So a missing header, compiler or driver is found before an op has overwritten anything.
    reason = _found.get(device)
    if reason is None:
        reason = _found[device] = _try(device)
    if reason:
        raise Refusal(reason)


def launch(
    kernel: Any,  # noqa: ANN401, what triton.jit makes
    grid: Sequence[int],
    *args: Any,  # noqa: ANN401, those of the kernel
    warps: int = 4,
    **constants: Any,  # noqa: ANN401, those of the kernel
) -> None:
    """Launch a kernel on the device of its first argument, or refuse before it writes anything."""
    # Fused multiply-adds are allowed, because the exact ops have no sum after a product. The option
    # is given because Triton warns that its default will change.
    device = args[0].device
    if _broken:
        reason = _broken.get(_variant(kernel, device, args, warps, constants))
        if reason is not None:
            raise Refusal(reason)
    try:
        # To ask which one is current takes less time than to make it so.
        is_current = device.type == "cuda" and device.index == torch.cuda.current_device()
        with nullcontext() if is_current else current(device):
            kernel[tuple(grid)](*args, num_warps=warps, enable_fp_fusion=True, **constants)
    except Exception as error:  # whatever the compiler and the driver raise
        if is_out_of_memory(error):
            raise
        reason = f"its kernel {kernel.__name__.strip('_')} failed ({_first_line(error)})"
        if not any(name == kernel.__name__ for name, *_ in _broken):
            log_once(f"triton: {reason}; a slower backend runs such calls. Try a newer Triton")
        _broken[_variant(kernel, device, args, warps, constants)] = reason
        raise Refusal(reason) from error


def _variant(
    kernel: Any,  # noqa: ANN401, what triton.jit makes
    device: torch.device,
    args: Sequence[Any],
    warps: int,
    constants: Mapping[str, Any],
) -> tuple[Any, ...]:
    """Return what decides how Triton compiles a launch, its name first."""
    kinds = (x.dtype if isinstance(x, torch.Tensor) else type(x) for x in args)
    return kernel.__name__, device, warps, *kinds, *constants.items()


def _try(device: torch.device) -> str:
    try:
        probe = importlib.import_module(".probe", __package__).probe
        numbers = torch.zeros(16, dtype=torch.int32, device=device)
        with current(device):
            probe[(1,)](numbers, COUNT=16, num_warps=1, enable_fp_fusion=True)
        if numbers.tolist() != list(range(16)):
            raise RuntimeError("a kernel wrote incorrect values")
    except Exception as error:  # whatever a broken installation, compiler and driver raise
        if is_out_of_memory(error):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            log_once(
                "Triton is not installed, so other kernels are used; its own can be faster: "
                "pip install triton (on Windows: triton-windows)"
            )
            return "triton is not installed"
        reason = f"cannot run a kernel on {device}"
        cause = _first_line(error)
        log_once(
            f"Triton {reason}, so other kernels are used ({cause}). It needs a C compiler (set "
            "CC), the headers of Python, and a matching driver and PyTorch"
        )
        return f"triton {reason} ({cause})"
    return ""


def _first_line(error: Exception) -> str:
    text = first_line(error).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
