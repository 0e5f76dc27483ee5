"""Number formats: which one a device computes fastest in, and float32 that is float32."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

_logger = logging.getLogger(__name__)

# bf16 loses bits, so it must be worth it: this much faster on a convolution of the VAE's kind.
_WORTH_IT = 1.15

# A 16-bit dtype that takes this many times as long as float32 has no fast convolution on the CPU:
# float16 takes 16 times as long in three dimensions without AVX512-FP16 or AMX-FP16.
_TOO_SLOW = 1.5

_NARROW = (torch.float16, torch.bfloat16)


@dataclass
class _State:
    """Threads inside `full_float32`, and the settings to bring back."""

    holders: int = 0
    saved: list[tuple[object, str, object]] = field(default_factory=list)


_lock = threading.Lock()
_states: dict[str, _State] = {}


def fastest_decode_dtype(device: torch.device) -> torch.dtype:
    """The dtype to decode in where the caller has no wish.

    On a CPU bfloat16 where a convolution is measured faster in it than in float32, else float32. On
    CUDA bfloat16 where the chip has it. Elsewhere float32.
    """
    if device.type == "cpu":
        return torch.bfloat16 if _bf16_is_faster() else torch.float32
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that a computation runs in where results are to be in `dtype`.

    float32 for a 16-bit dtype whose convolutions are measured to be slow on a CPU, which is logged
    once; else `dtype`.
    """
    if device.type != "cpu" or dtype not in _NARROW:
        return dtype
    with _lock:
        return torch.float32 if _is_slow(dtype) else dtype


@contextlib.contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Keep float32 convolutions and products in float32 inside the block; restored after.

    PyTorch's switches (TF32 on CUDA, bf16 or TF32 in oneDNN) are global. The first thread that
    enters saves and sets them, and the last that leaves restores them.
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
    """Whether bfloat16 is worth its lost bits: 20 ms, once per process."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return _times_as_long(torch.bfloat16, channels=96, size=48) < 1 / _WORTH_IT


@functools.cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Whether convolutions in a dtype are slow; logged where they are: 40 ms, once per process."""
    times = _times_as_long(dtype, channels=64, size=24)
    if times < _TOO_SLOW:
        return False
    name = str(dtype).removeprefix("torch.")
    _logger.warning(
        "Fast Video VAE: %s convolutions take %.1f times as long as float32 on this CPU; computing "
        "in float32, results stay %s",
        name,
        times,
        name,
    )
    return True


def _times_as_long(dtype: torch.dtype, *, channels: int, size: int) -> float:
    """The fastest of a small convolution in a dtype over that in float32, timed in turn."""
    best = dict.fromkeys((torch.float32, dtype), float("inf"))
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        order = torch.channels_last_3d
        cases = {
            each: (
                torch.ones(1, channels, 3, size, size, dtype=each).to(memory_format=order),
                torch.ones(channels, channels, 3, 3, 3, dtype=each).to(memory_format=order),
            )
            for each in best
        }
        for turn in range(4):
            for each, (x, weight) in cases.items():
                start = time.perf_counter()
                F.conv3d(x, weight, padding=(0, 1, 1))
                best[each] = min(best[each], time.perf_counter() - start)
            # More runs would not change what two have shown, the second of which sets nothing up.
            if turn and best[dtype] > 4 * best[torch.float32]:
                break
    return best[dtype] / best[torch.float32]
