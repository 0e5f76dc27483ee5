"""Trial of the backends on a GPU: only correct backends run an op, the fastest first.

GPUs and versions of PyTorch, Triton and the driver differ. So the first call of each kind runs all
backends on generated inputs. A backend whose result differs from the reference's by more than
rounding is not used on that device; the others are ordered by speed. The trial takes milliseconds,
plus Triton's compilation. Its result holds for the process.
"""

import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import measure, reference, sample_inputs
from .backends import ORDER
from .errors import Refusal, log_once
from .warmup_log import preparing

_logger = logging.getLogger(__name__)

# Elements of the activations of a trial for small and for large calls, and the size from which a
# call is large. A small call is bound by its launch, a large one by memory traffic.
_SMALL, _LARGE = 1 << 18, 1 << 24
_LARGE_FROM = 1 << 22

# Frames of a trial; more than one, because the channels of a frame can come from several frames.
_FRAMES = 4

# Fewest and most pixels of a trial of attention.
_FEWEST_KEYS, _MOST_KEYS = 1 << 10, 1 << 14

# Allowed difference of two backends: roundings in units of the dtype's epsilon, and a share of the
# largest value for sums in another order, TF32 and 16-bit products.
_ROUNDINGS = 4
_SUMS = 1e-3

# Runs an op on a backend, or raises its `Refusal`: `dispatch.ask`.
Ask = Callable[..., Tensor]

_lock = threading.Lock()
_orders: dict[tuple[Any, ...], tuple[str, ...]] = {}


def order(ask: Ask, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the backends for a call on a GPU, in the order in which to try them.

    Args:
        ask: Runs an op on a backend.
        op: Name of the op.
        args: Its arguments; the first is a tensor `[...]` on the device.
        kwargs: Its keyword arguments.

    Returns:
        Names out of `ORDER`, the reference among them.
    """
    x: Tensor = args[0]
    if not x.numel():
        return ORDER
    key = (op, x.device, _size_class(op, x), *map(_kind, args), *map(_kind, kwargs.values()))
    known = _orders.get(key)
    if known is not None:
        return known
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return ("reference",)  # no trial is possible while a CUDA graph is captured
    with _lock:
        if key not in _orders:
            given = sample_inputs.names(getattr(reference, op), args, kwargs)
            with preparing("kernel build", "trials"):
                found = _tried(ask, op, x, given)
            if found is None:
                return ("reference",)  # for this call only; a later call may have enough memory
            _orders[key] = found
        return _orders[key]


def _tried(ask: Ask, op: str, x: Tensor, given: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the backends in order; None: not enough memory for the trial."""
    size = _size(op, x)
    try:
        # Outside inference mode, so that the trial does not depend on the mode of the first caller.
        with torch.inference_mode(False), torch.no_grad():
            return _ranked(ask, op, x, size, given)
    except torch.OutOfMemoryError:
        return None


def _ranked(
    ask: Ask, op: str, x: Tensor, size: tuple[int, int, int], given: Mapping[str, Any]
) -> tuple[str, ...]:
    def run(name: str) -> tuple[Tensor, Tensor | None]:
        arguments = sample_inputs.call(op, size, x.dtype, x.device, given)
        return ask(name, op, **arguments), arguments.get("tail")

    expected = run("reference")
    right = ["reference"]
    for name in ORDER:
        if name == "reference":
            continue
        try:
            result = run(name)
        except Refusal as refusal:
            _logger.debug("%s refuses %s: %s", name, op, refusal)
            continue
        if all(map(_agree, result, expected)):
            right.append(name)
        else:
            device = torch.cuda.get_device_name(x.device) if x.is_cuda else x.device
            log_once(
                f"{name} computes {op} incorrectly on {device} and is not used "
                "there. Please report it with the versions of the driver, torch and triton"
            )
    if len(right) == 1:
        return ("reference",)
    arguments = sample_inputs.call(op, size, x.dtype, x.device, given)
    calls = {name: functools.partial(ask, name, op, **arguments) for name in right}
    small = math.prod(x.shape) < _LARGE_FROM
    times = measure.seconds(calls, x.device, launches=small)
    ranked = sorted(right, key=lambda name: times[name])
    timings = ", ".join(f"{name} {times[name] * 1e3:.3f} ms" for name in ranked)
    _logger.debug("%s of %s on %s: %s", op, list(x.shape), x.device, timings)
    return tuple(ranked)


def _agree(actual: Tensor | None, expected: Tensor | None) -> bool:
    """Return whether two results differ by rounding only."""
    if actual is None or expected is None:
        return actual is expected
    if expected.dtype == torch.uint8:
        return bool(((actual.int() - expected.int()).abs() <= 1).all())
    wide = expected.float()
    relative = _ROUNDINGS * torch.finfo(expected.dtype).eps * wide.abs()
    return bool(((actual.float() - wide).abs() <= relative + _SUMS * wide.abs().max()).all())


def _kind(value: Any) -> Any:  # noqa: ANN401, an argument
    """Return the properties of an argument that decide the speed of a backend, without its size."""
    if not isinstance(value, Tensor):
        return tuple(value) if isinstance(value, list) else value
    channels = value.shape[1] if value.ndim == 5 else value.shape[-1]
    return value.dtype, value.device.type, channels


def _size_class(op: str, x: Tensor) -> int:
    """Return the number of elements of a trial; for attention the number of pixels."""
    if op == "attention":
        return 1 << min(max(_FEWEST_KEYS, x.shape[1]), _MOST_KEYS).bit_length() - 1
    return _SMALL if x.numel() < _LARGE_FROM else _LARGE


def _size(op: str, x: Tensor) -> tuple[int, int, int]:
    """Return frames, height and width of a trial; odd sizes also test partial tiles."""
    if op == "attention":
        return 1, 1, _size_class(op, x)
    channels = x.shape[1] if x.ndim == 5 else x.shape[-1]
    side = math.isqrt(_size_class(op, x) // (_FRAMES * channels)) | 1
    return _FRAMES, side, side
