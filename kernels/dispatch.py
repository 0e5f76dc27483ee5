"""Selection of the backend that runs a call, in one place.

Backends have functions with the names and arguments of the ops in `kernels/__init__.py`. On a CPU
they are tried in the order of `ORDER`; on a GPU `serving.py` has those that are built and right,
and `routes.py` the candidates of the convolutions. A backend that does not support a call raises
`Refusal` with the reason before it does any work, and the next one is tried. A candidate of the
convolutions can have variants, such as tile sizes: "triton:2" is its third.
"""

import functools
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .backends import CONVOLUTIONS, INT8_ORDER, ORDER, OWN_CONVOLUTIONS, TRIED, forced
from .convolution.compose import composed
from .convolution.weight import ConvWeight
from .devices import device_kind
from .errors import BackendError, Refusal
from .modules import module_of
from .ready import recorded, serving
from .ready.proof import current_proofs
from .routes import Route, route_of

# The order on a CPU until the C++ kernels are loaded.
_WITHOUT_NATIVE = ("triton", "cuda", "reference")


def run(op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
    """Run an op other than `conv2d` and `conv3d` on the first backend that supports the call."""
    _refuse_gradients(op, args, kwargs)
    notes, reasons = serving.recorder(), dict[str, str]()
    if notes is not None:
        return _noted(notes, ask, op, *args, **kwargs)
    for name in _order(op, args, kwargs):
        try:
            return _run(name, op, args, kwargs)
        except Refusal as refusal:
            reasons[name] = str(refusal)
    raise BackendError(op, reasons)


def run_kernel(op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
    """Run an op on a backend other than the reference; None if there is none, or for a gradient."""
    for name in () if _requires_gradient(args, kwargs) else _order(op, args, kwargs):
        if name != "reference":
            with suppress(Refusal):
                return _run(name, op, args, kwargs)
    return None


def run_convolution(
    op: str,
    route: Route | None,
    x: Tensor,
    weight: ConvWeight,
    *args: Any,  # noqa: ANN401, those of the op
    **kwargs: Any,  # noqa: ANN401, those of the op
) -> Tensor:
    """Run `conv2d` or `conv3d` on the first candidate of a route that supports the call."""
    given = x, weight, *args
    _refuse_gradients(op, given, kwargs)
    if route is None:
        norm = kwargs.get("gamma") is not None
        route = route_of(x, weight, kwargs["stride"], kwargs["padding"], norm=norm)
    notes, reasons = serving.recorder(), dict[str, str]()
    if notes is not None:
        asks = None if route.kernel is None else _asks(route.kernel)
        noted = functools.partial(_noted, notes, asks, op)
        if asks is not None:
            return noted(*given, **kwargs)
        return composed(noted, route.fused, run, *given, **kwargs)
    if route.kernel is not None:
        try:
            return _run_kernel(route.kernel, op, given, kwargs)
        except Refusal as refusal:
            reasons[route.kernel] = str(refusal)
    for name in route.candidates:
        try:
            if route.proves is not None and (proofs := current_proofs()) is not None:
                plain = functools.partial(ask, name, op, *given, **kwargs)
                return proofs.proved(ask, route.proves, op, given, kwargs, plain)
            return ask(name, op, *given, **kwargs)
        except Refusal as refusal:
            reasons[name] = str(refusal)
    raise BackendError(op, reasons)


def ask(backend: str, op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
    """Run an op on one backend, or raise its `Refusal`."""
    name, _, variant = backend.partition(":")
    if op not in ("conv2d", "conv3d"):
        return _run(name, op, args, kwargs)
    module = module_of(name)
    function = getattr(module, op, None)
    if function is None:
        raise Refusal("the backend has no such op")
    if variant:
        kwargs["variant"] = int(variant)
    x, weight, *_ = args if len(args) > 1 else (kwargs["x"], kwargs["weight"])
    norm = kwargs.get("gamma") is not None
    fused = module.fuses(x, weight, kwargs["stride"], kwargs["padding"], norm=norm)
    return composed(function, fused, run, *args, **kwargs)


def _noted(
    notes: serving.Recorder,
    asks: Any,  # noqa: ANN401, a function like `ask`, or None
    op: str,
    *args: Any,  # noqa: ANN401, those of the op
    **kwargs: Any,  # noqa: ANN401, those of the op
) -> Tensor:
    """Note a call on `meta`, and return memory for its result."""
    made = recorded.result_of(op, args, kwargs, notes.device)
    notes.note(asks, op, args, kwargs, made)
    return made


def _refuse_gradients(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _requires_gradient(args, kwargs):
        raise ValueError(
            f"a tensor of {op} requires a gradient; expected ones without, such as x.detach()"
        )


def _requires_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(
        getattr(each, "requires_grad", False) for each in (*args, *kwargs.values())
    )


def _run(backend: str, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    function = getattr(module_of(backend), op, None)
    if function is None:
        raise Refusal("the backend has no such op")
    return function(*args, **kwargs)


def _order(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    coded = op == "int8_conv3d"
    chosen = forced()
    if chosen is not None and chosen in (CONVOLUTIONS if coded else ORDER):
        return (chosen,)
    x = args[0] if args else None
    if isinstance(x, Tensor) and device_kind(x.device) in TRIED:
        return serving.backends_of(ask, op, args, kwargs)
    if coded:
        return INT8_ORDER
    seen = serving.snapshot()
    return ORDER if seen is None or seen.native else _WITHOUT_NATIVE


def _run_kernel(kernel: str, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run a convolution by one of our kernels, or refuse if that for these terms is not built."""
    if serving.backends_of(_asks(kernel), op, args, kwargs) == serving.LIBRARY:
        raise Refusal("its kernel is not built yet")
    return ask(kernel, op, *args, **kwargs)


@functools.cache
def _asks(kernel: str) -> Any:  # noqa: ANN401, a function like `ask`
    """Return `ask` without other convolutions of ours than `kernel`."""

    def asks(backend: str, op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
        is_own = backend == kernel.partition(":")[0]
        if backend in OWN_CONVOLUTIONS and not is_own:
            raise Refusal("the route has another kernel")
        return ask(kernel if is_own else backend, op, *args, **kwargs)

    return asks
