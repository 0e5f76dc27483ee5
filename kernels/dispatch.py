"""Selection of the backend that runs a call, in one place.

Backends have functions with the names and signatures of the ops in `kernels/__init__.py`. They are
tried in the order of `ORDER`, fastest first; on a GPU in the order that `autotune.py` has measured.
A backend that does not support a call raises `Refusal` with the reason before it does any work, and
the next one is tried. A missing compiler or package is a reason too: found once, logged once,
remembered.
"""

import importlib
from types import ModuleType
from typing import Any

from .backends import ORDER, forced
from .errors import BackendError, Refusal

_MODULES = {
    "triton": ".triton_ops.ops",
    "cuda": ".cuda_ops",
    "native": ".native_ops",
    "reference": ".reference",
}

_loaded: dict[str, ModuleType] = {}


def run(op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
    """Run an op on the first backend that supports the call.

    Args:
        op: Name of the op in `kernels/__init__.py`.
        *args: Arguments of the op.
        **kwargs: Keyword arguments of the op.

    Returns:
        The result of the op.

    Raises:
        BackendError: No backend supports the call.
    """
    reasons: dict[str, str] = {}
    for name in _order(op, args, kwargs):
        try:
            return ask(name, op, *args, **kwargs)
        except Refusal as refusal:
            reasons[name] = str(refusal)
    raise BackendError(op, reasons)


def run_kernel(op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
    """Run an op on a backend other than the reference.

    Args:
        op: Name of the op.
        *args: Arguments of the op, already checked.
        **kwargs: Keyword arguments of the op.

    Returns:
        The result of the op, or None if only the reference would run it.
    """
    for name in _order(op, args, kwargs):
        if name == "reference":
            return None
        try:
            return ask(name, op, *args, **kwargs)
        except Refusal:
            continue
    return None


def ask(backend: str, op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
    """Run an op on one backend.

    Args:
        backend: Name of the backend.
        op: Name of the op.
        *args: Arguments of the op.
        **kwargs: Keyword arguments of the op.

    Returns:
        The result of the op.

    Raises:
        Refusal: The backend does not support the call.
    """
    module = _loaded.get(backend)
    if module is None:
        module = _loaded[backend] = importlib.import_module(_MODULES[backend], __package__)
    function = getattr(module, op, None)
    if function is None:
        raise Refusal("the backend has no such op")
    return function(*args, **kwargs)


def _order(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    chosen = forced()
    if chosen is not None:
        return (chosen,)
    if args and getattr(args[0], "is_cuda", False):
        autotune = importlib.import_module(
            ".autotune", __package__
        )  # imported with the first GPU call
        return autotune.order(ask, op, args, kwargs)
    return ORDER
