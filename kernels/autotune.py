"""Trial of the backends on a GPU: only correct backends run an op, the fastest first.

This holds for every kind of GPU for which a backend has kernels. GPUs and versions of PyTorch,
Triton and the driver differ. So the first call of each kind runs all backends on generated inputs.
A backend that fails, or whose result differs from the reference's by more than rounding, is not
used on that device; the others are ordered by speed. The trial takes milliseconds, plus Triton's
compilation. Its result holds for the process.

Calls of a kind run the same variant of a Triton kernel. Triton compiles one for each number of
channels, dtype and compile-time argument, and for sizes that are multiples of 16; it does not
distinguish other sizes, nor tensors that can be omitted.
"""

import functools
import importlib
import inspect
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import measure, sample_inputs
from .backends import ORDER
from .devices import device_name
from .errors import Refusal, first_line, is_out_of_memory, log_once
from .warmup_log import preparing

_logger = logging.getLogger(__name__)

# Elements of the activations of a trial: enough that memory traffic decides, as in a video, and few
# if memory is short.
_ELEMENTS = (1 << 24, 1 << 18)

# Frames of a trial; more than one, because the channels of a frame can come from several frames.
_FRAMES = 4

# Pixels of a trial of attention, which is 0.1 s for the slowest backend, by the remainder of a
# division by 32. The blocks of its kernels are multiples of 16 or 32 pixels, and the last one is
# checked separately. Rows of scores that are multiples of 8 have another softmax.
_PIXELS = {0: 4096, 8: 4072, 16: 4080, 24: 4072}
_ODD_PIXELS = 4081

# Ops whose results can have a few channels, and channels of which no part is a multiple of 16.
_FEW_CHANNELS = frozenset({"frames_to_images", "pixel_shuffle_3d"})
_MANY_CHANNELS = 32

# Allowed difference of two backends: roundings in units of the dtype's epsilon, and a share of the
# largest value for sums in another order, TF32 and 16-bit products.
_ROUNDINGS = 4
_SUMS = 1e-3

# Most characters of an error in the log.
_REASON_LENGTH = 80

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
    key = _kind(op, x, args, kwargs)
    known = _orders.get(key)
    if known is not None:
        return known
    if is_capturing(x.device):
        return ("reference",)  # no trial is possible while a CUDA graph is captured
    with _lock:
        if key not in _orders:
            given = sample_inputs.names(_definition(op), args, kwargs)
            with preparing("kernel build", "trials"):
                found = _tried(ask, op, x, given)
            if found is None:
                return ("reference",)  # for this call only; a later call may have enough memory
            _orders[key] = found
        return _orders[key]


def _tried(ask: Ask, op: str, x: Tensor, given: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the backends in order; None: not enough memory for the trial."""
    for elements in _ELEMENTS:
        size = _size(op, x, given, elements)
        try:
            # Outside inference mode, so that the trial does not depend on the first caller's mode.
            with torch.inference_mode(False), torch.no_grad():
                return _ranked(ask, op, x, size, given)
        except Exception as error:
            if not is_out_of_memory(error):
                log_failure("the trial of", op, x, error)
                return ("reference",)
    return None


def _ranked(
    ask: Ask, op: str, x: Tensor, size: tuple[int, int, int], given: Mapping[str, Any]
) -> tuple[str, ...]:
    forms = sample_inputs.forms(op, given)
    right = set(ORDER)
    for form in forms:
        new_call = functools.partial(sample_inputs.call, op, size, x.dtype, x.device, form)
        right = _right(ask, op, right, new_call)
    if right == {"reference"}:
        return ("reference",)
    arguments = sample_inputs.call(op, size, x.dtype, x.device, forms[0])
    calls = {name: functools.partial(ask, name, op, **arguments) for name in ORDER if name in right}
    times = measure.seconds(calls, x.device, launches=False)
    ranked = sorted(calls, key=lambda name: times[name])
    timings = ", ".join(f"{name} {times[name] * 1e3:.3f} ms" for name in ranked)
    _logger.debug("%s of %s on %s: %s", op, list(x.shape), x.device, timings)
    return tuple(ranked)


def _right(
    ask: Ask, op: str, names: Collection[str], new_call: Callable[[], dict[str, Any]]
) -> set[str]:
    """Return the backends of `names` that run a call of `new_call` and agree with the reference."""

    def run(name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        arguments = new_call()
        y, counts = ask(name, op, **arguments), arguments.get("saturated")
        # Counts differ by a share: rounding decides whether a value at the last half has a code.
        return y, arguments.get("tail"), None if counts is None else counts.float()

    expected = run("reference")
    x, right = expected[0], {"reference"}
    for name in ORDER:
        if name == "reference" or name not in names:
            continue
        try:
            result = run(name)
        except Refusal as refusal:
            _logger.debug("%s refuses %s: %s", name, op, refusal)
            continue
        except Exception as error:
            if is_out_of_memory(error):
                raise
            log_failure(name, op, x, error)
            continue
        if all(map(agree, result, expected)):
            right.add(name)
        else:
            log_incorrect(name, op, x)
    return right


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is captured on `device`: no trial is possible, nor a free."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def log_incorrect(name: str, op: str, x: Tensor) -> None:
    """Log once that results of `name` for `op` are wrong on the device of `x` `[...]`."""
    log_once(
        f"{name} computes {op} incorrectly on {device_name(x.device)} and is not used "
        "there. Please report it with the versions of the driver, torch and triton"
    )


def log_failure(name: str, op: str, x: Tensor, error: Exception) -> None:
    """Log once that `name` failed for `op` with `error` on the device of `x` `[...]`."""
    reason = first_line(error)[:_REASON_LENGTH]
    log_once(
        f"{name} {op} failed on {device_name(x.device)} ({type(error).__name__}: {reason}); "
        "another backend runs such calls"
    )


def agree(
    actual: Tensor | None,
    expected: Tensor | None,
    *,
    largest: Tensor | None = None,
    share: float = _SUMS,
) -> bool:
    """Return whether two results differ by rounding only.

    Args:
        actual: `[...]`, or None.
        expected: Shape and dtype of `actual`, or None.
        largest: The largest absolute value of the whole result; None: that of `expected`.
        share: Allowed difference as a share of `largest`.

    Returns:
        False for NaN.
    """
    if actual is None or expected is None:
        return actual is expected
    if not expected.is_floating_point():
        return bool(((actual.int() - expected.int()).abs() <= 1).all())
    wide = expected.float()
    relative = _ROUNDINGS * torch.finfo(expected.dtype).eps * wide.abs()
    largest = wide.abs().max() if largest is None else largest
    return bool(((actual.float() - wide).abs() <= relative + share * largest).all())


def _kind(op: str, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the variants of the kernels for a call depend on."""
    key: list[Any] = [op, x.device, x.dtype, _channels(x)]
    optional = sample_inputs.OPTIONAL.get(op, ())
    named = {**dict(zip(_parameters(op), args, strict=False)), **kwargs}
    if named.get("codes") is not None:
        key.append(sample_inputs.coded_dtype(x.device, named))
    vectors = set()
    for name, value in named.items():
        if not isinstance(value, Tensor):
            if value is not None:
                key.append((name, tuple(value) if isinstance(value, list) else value))
        elif name == "out":
            if op in sample_inputs.CONVERTING:
                key.append((name, value.dtype, value.stride(1) == 1))
        elif name in sample_inputs.VECTORS:
            vectors.add(value.dtype)
            if name not in optional:
                key.append(name)
        elif name not in optional:
            key.append((name, value.dtype, _channels(value)))
    return (*key, frozenset(vectors or {x.dtype}), *_size(op, x, named, 0))


@functools.cache
def _parameters(op: str) -> tuple[str, ...]:
    return tuple(inspect.signature(_definition(op)).parameters)


def _definition(op: str) -> Callable[..., Tensor]:
    """Return the reference implementation of `op`, whose import waits for the first GPU call."""
    return getattr(importlib.import_module(".reference", __package__), op)


def _channels(x: Tensor) -> int:
    return x.shape[1] if x.ndim == 5 else x.shape[-1]


def _size(op: str, x: Tensor, given: Mapping[str, Any], elements: int) -> tuple[int, int, int]:
    """Return frames, height and width of a trial of about `elements`.

    Sizes are odd, which also tests partial tiles, unless a kernel is compiled for multiples of 16.
    """
    if op == "attention":
        return 1, 1, _PIXELS.get(x.shape[1] % 32, _ODD_PIXELS)
    channels = _channels(x)
    side = math.isqrt(elements // (_FRAMES * channels)) | 1
    if x.ndim < 5 or (op not in _FEW_CHANNELS and channels % _MANY_CHANNELS == 0):
        return _FRAMES, side, side
    height, width = x.shape[3:]
    even = 16 * (side // 16 | 1)
    high = given["size"][1] if op == "pixel_shuffle_3d" else given.get("patch", 1)
    if high > 1 and width % 16 == 0:  # otherwise all rows are one run
        return _FRAMES, side, even
    return _FRAMES, even if height * width % 16 == 0 else side, side
