"""The CPU: its name, and the instructions that decide which dtypes have fast convolutions.

oneDNN multiplies bfloat16 with AVX512-BF16 or AMX, and float16 with AVX512-FP16 or AMX-FP16
(oneDNN, "Data Types"). Without these it converts bfloat16 to float32 where there is AVX-512, which
costs little, and PyTorch's own loops take float16: 16 times as long as float32 in three dimensions.
"""

import functools
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .kinds import device_kind

# Where Linux names the processor, and lists its features for versions of PyTorch without a query.
_CPUINFO = Path("/proc/cpuinfo")


def multiplies_bfloat16() -> bool:
    """Return whether convolutions in bfloat16 are faster than in float32 on this CPU."""
    # Never on ARM, where oneDNN's own are plain loops, whatever the processor has.
    known = {"avx512_bf16", "amx_bf16", "amx_tile"} & cpu_features()
    return bool(known) and not slow_on_cpu(torch.bfloat16)


def slow_on_cpu(dtype: torch.dtype) -> bool:
    """Return whether convolutions in a 16-bit `dtype` are far slower than in float32."""
    if not torch.backends.mkldnn.is_available():
        return True
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    query = getattr(torch.ops.mkldnn, name, None)  # of PyTorch 2.6 and later
    if query is None or not query():
        return True
    is_x86 = "AVX" in torch.backends.cpu.get_cpu_capability() or "sse2" in cpu_features()
    narrow = dtype == torch.float16 and is_x86
    return narrow and not {"avx512_fp16", "amx_fp16"} & cpu_features()


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for matrix products: `dtype` where its sums are float32 internally."""
    wide = torch.promote_types(dtype, torch.float32)
    if device_kind(device) in ("nvidia", "amd"):
        return dtype
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return wide
    return dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else wide


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the features of the processor, such as `avx512_bf16`; none where they are unknown."""
    query: Any = getattr(torch.cpu, "get_capabilities", None)
    if query is not None:
        return frozenset(name for name, value in query().items() if value is True)
    return frozenset(_listed("flags").split())


def processor() -> str:
    """Return the model of the processor; without one, the name of its architecture."""
    # `platform.processor` starts another process on Linux and macOS.
    name = _listed("model name") or os.environ.get("PROCESSOR_IDENTIFIER")
    return name or platform.machine()


def _listed(name: str) -> str:
    """Return what Linux lists under a name for the first processor; "" where it does not."""
    with suppress(OSError), _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        return next((line.partition(":")[2].strip() for line in lines if name in line), "")
    return ""
