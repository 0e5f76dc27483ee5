"""Number formats: which one a device computes fastest in, and float32 that is float32."""

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

# bf16 loses bits, so it must be worth it: this much faster on a convolution of the VAE's kind.
_WORTH_IT = 1.15


@dataclass
class _State:
    """Threads inside `full_float32`, and the settings to bring back."""

    holders: int = 0
    saved: list[tuple[object, str, object]] = field(default_factory=list)


_lock = threading.Lock()
_states: dict[str, _State] = {}


def fastest_decode_dtype(device: torch.device) -> torch.dtype:
    """The dtype to decode in where the caller has no wish.

    Args:
        device: Where the VAE is.

    Returns:
        On a CPU bfloat16 where a convolution is measured faster in it than in float32, else
        float32. On CUDA bfloat16 where the chip has it. Elsewhere float32.
    """
    if device.type == "cpu":
        return torch.bfloat16 if _bf16_is_faster() else torch.float32
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


@contextlib.contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Keep float32 convolutions and products in float32 inside the block; restored after.

    PyTorch's switches (TF32 on CUDA, bf16 or TF32 in oneDNN) are global. The first thread that
    enters saves and sets them, and the last that leaves restores them.

    Args:
        device: Whose switches.
    """
    state = _states.setdefault(device.type, _State())
    with _lock:
        if state.holders == 0:
            state.saved = _switch_off(device.type)
        state.holders += 1
    try:
        yield
    finally:
        with _lock:
            state.holders -= 1
            if state.holders == 0:
                for owner, name, value in state.saved:
                    setattr(owner, name, value)


def _switch_off(device_type: str) -> list[tuple[object, str, object]]:
    """Set every switch that lets float32 be less, and return what those were."""
    saved = []
    for owner, name, value, full in _switches(device_type):
        before = getattr(owner, name)
        if before not in full:
            setattr(owner, name, value)
            saved.append((owner, name, before))
    return saved


def _switches(device_type: str) -> list[tuple[object, str, object, tuple[object, ...]]]:
    """The switches of a kind of device: owner, name, what to set, and what is as good."""
    backends: Any = torch.backends
    new = hasattr(backends.cudnn, "conv")  # torch >= 2.9, where the older ones must not be mixed in
    if device_type == "cuda" and new:
        owners = (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)
        return [(owner, "fp32_precision", "ieee", ("ieee",)) for owner in owners]
    if device_type == "cuda":
        owners = (backends.cudnn, backends.cuda.matmul)
        return [(owner, "allow_tf32", False, (False,)) for owner in owners]
    if device_type == "cpu" and new:
        owners = (backends.mkldnn.conv, backends.mkldnn.matmul)
        return [(owner, "fp32_precision", "ieee", ("ieee", "none")) for owner in owners]
    return []


@functools.cache
def _bf16_is_faster() -> bool:
    """Time one small convolution of the VAE's kind in both formats: 20 ms, once per process."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    seconds = {}
    with torch.inference_mode(False), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(1, 96, 3, 48, 48, dtype=dtype).to(memory_format=torch.channels_last_3d)
            weight = torch.ones(96, 96, 3, 3, 3, dtype=dtype).to(
                memory_format=torch.channels_last_3d
            )
            best = float("inf")
            for _ in range(4):
                start = time.perf_counter()
                F.conv3d(x, weight, padding=(0, 1, 1))
                best = min(best, time.perf_counter() - start)
            seconds[dtype] = best
    return seconds[torch.float32] > _WORTH_IT * seconds[torch.bfloat16]
