"""The devices of Triton, and the launch of a kernel."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..backends import TRIED, forced
from ..constraints import refuse_old_bfloat16
from ..devices import current, device_kind
from ..errors import Refusal, first_line, is_out_of_memory, log_once

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
    try:
        # To ask which one is current takes less time than to make it so.
        is_current = device.type == "cuda" and device.index == torch.cuda.current_device()
        with nullcontext() if is_current else current(device):
            kernel[tuple(grid)](*args, num_warps=warps, enable_fp_fusion=True, **constants)
    except Exception as error:  # whatever a broken installation, compiler and driver raise
        if is_out_of_memory(error):
            raise
        cause = f"{type(error).__name__}: {first_line(error)}".rstrip(":. ")
        log_once(
            f"Triton cannot run kernels on {device}, so others are used ({cause}). It needs "
            "a C compiler (set CC), the headers of Python, and a matching driver and PyTorch"
        )
        raise Refusal(f"its kernel {kernel.__name__.strip('_')} failed ({cause})") from error
