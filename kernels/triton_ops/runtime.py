"""Whether Triton is there and runs, asked once per device, and how a kernel is started."""

import importlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..backends import forced
from ..constraints import refuse_old_bfloat16
from ..errors import Refusal, log_once

# The reason why Triton does not serve a device; "" where it does.
_found: dict[torch.device, str] = {}

# Kernels that could not be compiled or started on a device, and why.
_broken: dict[tuple[str, torch.device], str] = {}

# A grid may have 2^31 - 1 programs along its first axis, and no more than these along the others.
GRID_LIMIT = 65535


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for the compiler."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refuse_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse what is not on a GPU that has the dtype, before Triton is imported.

    The interpreter takes the CPU too, but it is there to test the kernels, hundreds of times slower
    than the reference: it serves nobody but who asks for this backend by name.
    """
    asked = interpreted() and forced() == "triton"
    if device.type != "cuda" and not (asked and device.type == "cpu"):
        raise Refusal(f"the tensors are on {device.type}; triton is for GPUs")
    if interpreted() and not asked:
        raise Refusal("TRITON_INTERPRET=1 makes it an interpreter")
    if forced() != "triton" and os.environ.get("FAST_VIDEO_VAE_TRITON") == "0":
        raise Refusal("FAST_VIDEO_VAE_TRITON=0 switches it off")
    refuse_old_bfloat16(device, dtype)


def require(device: torch.device) -> None:
    """Refuse where Triton is missing or cannot run a kernel.

    The first call of a device compiles and starts a trivial kernel: what a machine lacks (headers,
    a compiler, a driver) shows there, and not in an op that has overwritten something.
    """
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
    **constants: Any,  # noqa: ANN401, likewise
) -> None:
    """Start a kernel on the device of its first argument, with `grid` programs along each axis.

    Products and sums may be one instruction, which the exact ops never do one after the other. It
    is said because Triton's default is about to change, and warns of it.

    Raises:
        Refusal: It could not be compiled or started, on this call or before. Nothing was written.
    """
    device = args[0].device
    key = (kernel.__name__, device)
    if key in _broken:
        raise Refusal(_broken[key])
    here = nullcontext()
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        here = torch.cuda.device(device)
    try:
        with here:
            kernel[tuple(grid)](*args, num_warps=warps, enable_fp_fusion=True, **constants)
    except Exception as error:  # whatever the compiler and the driver raise
        reason = f"its kernel {kernel.__name__.strip('_')} failed ({_first_line(error)})"
        _broken[key] = reason
        log_once(f"triton: {reason}; a slower backend does this op. A newer Triton may help")
        raise Refusal(reason) from error


def _try(device: torch.device) -> str:
    try:
        importlib.import_module("triton")
    except ImportError:
        log_once(
            "Triton is not installed, so that slower kernels serve: pip install triton "
            "(on Windows: triton-windows)"
        )
        return "triton is not installed"
    except Exception as error:  # a broken installation raises anything
        return _complain("cannot be imported", error)
    try:
        probe = importlib.import_module(".probe", __package__).probe
        numbers = torch.zeros(16, dtype=torch.int32, device=device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            probe[(1,)](numbers, COUNT=16, num_warps=1, enable_fp_fusion=True)
        if numbers.tolist() != list(range(16)):
            raise RuntimeError("a kernel did not write what it should")
    except Exception as error:  # whatever the compiler and the driver raise
        return _complain(f"cannot run a kernel on {device}", error)
    return ""


def _complain(what: str, error: Exception) -> str:
    told = _first_line(error)
    log_once(
        f"Triton {what}, so that slower kernels serve ({told}). It needs a C compiler (CC names "
        "it), the headers of Python, and a driver and a PyTorch that fit"
    )
    return f"triton {what} ({told})"


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
