"""Which backends serve an op on a GPU: those that are right there, the fastest first.

GPUs differ, and so do the versions of PyTorch, Triton and the driver. So the first call of each
kind tries the backends on numbers of its own: one whose result is not the reference's within
rounding does not serve on that device, and of the others the fastest does. It takes milliseconds,
and what Triton has to compile. The outcome holds for the process.
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

# Elements of the activations of a trial, and of a call from which on it is like the large one: a
# small call costs what it takes to start it, a large one what it moves.
_SMALL, _LARGE = 1 << 18, 1 << 24
_LARGE_FROM = 1 << 22

# Frames of a trial; what goes into the channels of one frame has to come from several.
_FRAMES = 4

# Pixels that attention is tried with.
_FEWEST_KEYS, _MOST_KEYS = 1 << 10, 1 << 14

# What two backends may differ by: roundings, in units of the dtype; and what sums in another order
# make of the largest number, TF32 and products of 16 bits included.
_ROUNDINGS = 4
_SUMS = 1e-3

# Runs an op on a backend, or raises its `Refusal`: `dispatch.ask`.
Ask = Callable[..., Tensor]

_lock = threading.Lock()
_orders: dict[tuple[Any, ...], tuple[str, ...]] = {}


def order(ask: Ask, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The backends to ask for a call on a GPU: names out of `ORDER`, the reference among them.

    The first of `args` is the tensor that tells the device; `ask` runs an op on a backend.
    """
    x: Tensor = args[0]
    if not x.numel():
        return ORDER
    key = (op, x.device, _size_class(op, x), *map(_kind, args), *map(_kind, kwargs.values()))
    known = _orders.get(key)
    if known is not None:
        return known
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return ("reference",)  # nothing can be tried while a graph records
    with _lock:
        if key not in _orders:
            given = sample_inputs.names(getattr(reference, op), args, kwargs)
            with preparing("kernel build", "trials"):
                found = _tried(ask, op, x, given)
            if found is None:
                return ("reference",)  # for this call; a later one may have the memory
            _orders[key] = found
        return _orders[key]


def _tried(ask: Ask, op: str, x: Tensor, given: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The backends in order; None: there is no memory to try them."""
    size = _size(op, x)
    try:
        # Outside of inference mode: what is made here must not depend on who was first.
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
                f"{name} computes {op} wrongly on {device}, so that it does not "
                "serve there. Please report it with the versions of the driver, torch and triton"
            )
    if len(right) == 1:
        return ("reference",)
    arguments = sample_inputs.call(op, size, x.dtype, x.device, given)
    calls = {name: functools.partial(ask, name, op, **arguments) for name in right}
    small = math.prod(x.shape) < _LARGE_FROM
    times = measure.seconds(calls, x.device, launches=small)
    ranked = sorted(right, key=lambda name: times[name])
    told = ", ".join(f"{name} {times[name] * 1e3:.3f} ms" for name in ranked)
    _logger.debug("%s of %s on %s: %s", op, list(x.shape), x.device, told)
    return tuple(ranked)


def _agree(actual: Tensor | None, expected: Tensor | None) -> bool:
    """Whether two results differ by rounding alone."""
    if actual is None or expected is None:
        return actual is expected
    if expected.dtype == torch.uint8:
        return bool(((actual.int() - expected.int()).abs() <= 1).all())
    wide = expected.float()
    relative = _ROUNDINGS * torch.finfo(expected.dtype).eps * wide.abs()
    return bool(((actual.float() - wide).abs() <= relative + _SUMS * wide.abs().max()).all())


def _kind(value: Any) -> Any:  # noqa: ANN401, an argument
    """What of an argument decides how fast a backend is; the number of pixels is apart."""
    if not isinstance(value, Tensor):
        return tuple(value) if isinstance(value, list) else value
    channels = value.shape[1] if value.ndim == 5 else value.shape[-1]
    return value.dtype, value.device.type, channels


def _size_class(op: str, x: Tensor) -> int:
    """Elements that a trial takes; for attention pixels."""
    if op == "attention":
        return 1 << min(max(_FEWEST_KEYS, x.shape[1]), _MOST_KEYS).bit_length() - 1
    return _SMALL if x.numel() < _LARGE_FROM else _LARGE


def _size(op: str, x: Tensor) -> tuple[int, int, int]:
    """Frames, height and width of about so many elements; odd, where a tile may be wrong."""
    if op == "attention":
        return 1, 1, _size_class(op, x)
    channels = x.shape[1] if x.ndim == 5 else x.shape[-1]
    side = math.isqrt(_size_class(op, x) // (_FRAMES * channels)) | 1
    return _FRAMES, side, side
