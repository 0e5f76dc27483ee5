"""Selection of the backend that runs a call, in one place.

On a CPU the C++ kernels come before the reference. On a GPU `serving.py` has the kernels that are
built and right, and `routes.py` the candidates of the convolutions.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .backends import (
    CONVOLUTIONS,
    INT8_ORDER,
    ORDER,
    OWN_CONVOLUTIONS,
    SIGNATURES,
    TRIED,
    Kernel,
    Launch,
    forced,
)
from .constraints import refuse_memory
from .convolution.fused import result_of, sum_of
from .convolution.weight import ConvWeight
from .devices import device_kind
from .errors import BackendError, Refusal
from .modules import ask, backend, launch_of
from .ready import serving
from .ready.proof import current_proofs
from .ready.seen import Recorder, fallback, recorder, snapshot
from .routes import Candidate, Route
from .shapes import new_sums

_REFERENCE = ("reference",)

# On a CPU, with the C++ kernels.
_NATIVE = ("native", *_REFERENCE)

_PLACES = {op: names.index("out") for op, names in SIGNATURES.items() if "out" in names}


def run(op: str, *args: Any) -> Any:  # noqa: ANN401, those of `SIGNATURES`
    """Run an op other than `conv3d` on the first backend that supports the call."""
    refuse_gradients(op, args)
    notes = recorder()
    if notes is not None:
        return _noted(notes, op, args)
    return _first(*_order(op, args), op, args)


def _first(names: Sequence[str], built: bool, op: str, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Run an op on the first of some backends that supports the call; `built`: they run it."""
    reasons = dict[str, str]()
    if names != _REFERENCE:
        try:
            refuse_memory(op, args)
        except Refusal as refusal:
            reasons = {name: str(refusal) for name in names if name != "reference"}
    for name in names:
        if name not in reasons:
            try:
                return backend(name).launches()[op](*args) if built else ask(name, op, *args)
            except Refusal as refusal:
                reasons[name] = str(refusal)
    raise BackendError(op, reasons)


def convolve(route: Route, x: Tensor, weight: ConvWeight, *given: Any) -> Tensor:  # noqa: ANN401
    """Run `conv3d` on the first candidate of a route that supports the call.

    A candidate gets the terms that it adds; others are added in passes over its result. `given` are
    the arguments in `SIGNATURES` from the bias to `out`, and the padding.
    """
    bias, residual, residual_bias, gamma, tail, out, padding = given
    refuse_gradients("conv3d", (x, weight, bias, residual, residual_bias, gamma, tail, out))
    proofs = None if route.proves is None else current_proofs()
    if route.proves is not None and proofs is not None:
        terms = bias, residual, residual_bias, gamma, tail, out
        plain = functools.partial(convolve, replace(route, proves=None), x, weight, *terms, padding)
        return proofs.proved(route.proves, (x, weight, *terms, route.stride, padding), plain)
    tail = tail if tail is not None and tail.shape[2] else None
    if residual is None:
        bias, residual_bias = sum_of(bias, residual_bias, x.dtype), None
    reasons = dict[str, str]()
    for candidate in route.candidates:
        fused = candidate.fused
        # A norm adds a bias at no cost, and so does a pass for the residual.
        late = gamma is not None and not fused.norm
        waits = late or residual is not None or not fused.bias
        if fused.sums:
            ends = (None, tail, None) if late else (gamma, tail, out)
            terms = bias, residual, residual_bias, *ends
        else:
            terms = None if waits else bias, None, None, None, tail, None
        args = x, weight, *terms, route.stride, padding, candidate.kernel.tile
        try:
            y = _launch_of(candidate, args)(*args)
        except Refusal as refusal:
            reasons[candidate.kernel.backend] = str(refusal)
            continue
        if not fused.sums:
            return _finished(y, bias if waits else None, residual, residual_bias, gamma, out)
        if late:
            return _finished(y, None, None, None, gamma, out)
        return y if out is None else out
    raise BackendError("conv3d", reasons)


def _finished(y: Tensor, *terms: Tensor | None) -> Tensor:
    """Add the terms that a convolution has left out to `y` `[B, C, T, H, W]`, in its own memory."""
    bias, residual, residual_bias, gamma, out = terms
    target = y if out is None else out
    if residual is not None or (bias is not None and gamma is None):
        into = target if gamma is None else y
        y, bias = run("bias_residual", y, bias, residual, residual_bias, into), None
    if gamma is not None:
        return run("rms_norm_silu", y, gamma, bias, None, target, None, None, True, 0)
    return y if out is None or y is out else out.copy_(y)


def _launch_of(candidate: Candidate, args: Sequence[Any]) -> Launch:
    """Return the launch of a candidate for a call, or refuse it."""
    kernel = candidate.kernel
    if (notes := recorder()) is not None:
        return functools.partial(_noted_convolution, notes, kernel if candidate.is_built else None)
    if kernel.backend in OWN_CONVOLUTIONS:
        refuse_memory("conv3d", args)
    if not candidate.is_built:
        return launch_of(kernel.backend, "conv3d", args[0])
    if not serving.ours("conv3d", args, kernel):
        raise Refusal("its kernel is not built yet")
    return backend(kernel.backend).launches()["conv3d"]


def silu_mul_by_kernel(x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor | None:
    """Run `silu_mul` on a backend other than the reference; None: there is none, or a gradient."""
    if requires_gradient((x, gate)):
        return None
    args = x, gate, x.new_empty(x.shape) if out is None else out
    names = [name for name in _order("silu_mul", args)[0] if name != "reference"]
    try:
        # Asked, because those of other nodes may be subclasses of tensors.
        return _first(names, False, "silu_mul", args)
    except BackendError:
        return None


def refuse_gradients(op: str, args: tuple[Any, ...]) -> None:
    """Raise the `ValueError` of an argument that requires a gradient."""
    if requires_gradient(args):
        raise ValueError(
            f"a tensor of {op} requires a gradient; expected ones without, such as x.detach()"
        )


def requires_gradient(args: tuple[Any, ...]) -> bool:
    """Return whether autograd would record a call."""
    return torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in args)


def _noted(notes: Recorder, op: str, args: tuple[Any, ...]) -> Tensor:
    """Note a call on `meta`, and return its result, as the device would allocate it."""
    place = _PLACES.get(op)
    made = torch.empty_like(args[0]) if place is None else args[place]
    if op == "int8_conv3d" and (made is None or notes.device.type == "cpu"):
        fresh = new_sums(args[0], args[1], args[-1])  # oneDNN writes to memory of its own
        made = fresh if made is None else made
    notes.note(None, op, args, made)
    return made


def _noted_convolution(notes: Recorder, kernel: Kernel | None, *args: Any) -> Tensor:  # noqa: ANN401
    """Note the convolution of a kernel of ours, or of the library, and return its result."""
    x, weight, *_, tail, out, stride, padding, tile = args
    made = result_of(x, weight, tail, out, stride, padding)
    notes.note(kernel, "conv3d", (*args[:-4], made, stride, padding, tile), made)
    return made


def _order(op: str, args: tuple[Any, ...]) -> tuple[tuple[str, ...], bool]:
    """Return the backends for a call in order, and whether their kernels are known to run it."""
    chosen = forced()
    if chosen is not None and chosen in (CONVOLUTIONS if op == "int8_conv3d" else ORDER):
        return (chosen,), False
    if fallback().reference:
        return _REFERENCE, False
    kind = device_kind(args[0].device)
    if kind in TRIED:
        return (*serving.ours(op, args), *_REFERENCE), True
    if op == "int8_conv3d":
        return INT8_ORDER, False
    seen = snapshot()
    return (_NATIVE if kind == "cpu" and (seen is None or seen.native) else _REFERENCE), False
