"""Which backend runs a call: the one place that decides.

Backends carry functions of the same names and signatures as the ops of `kernels/__init__.py`. They
are asked in the order of `ORDER`, fastest first; on a GPU in the order that `autotune.py` has
measured there. One that cannot take a call raises `Refusal` with the reason before it does any
work, and the next is asked. What is missing on a machine (a compiler, a package) is such a reason
too: found once, logged once, remembered.
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
    """Run an op, named as in the contract, on the first backend that takes it.

    Raises:
        BackendError: No backend takes the call.
    """
    reasons: dict[str, str] = {}
    for name in _order(op, args, kwargs):
        try:
            return ask(name, op, *args, **kwargs)
        except Refusal as refusal:
            reasons[name] = str(refusal)
    raise BackendError(op, reasons)


def run_kernel(op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the op
    """Run an op on a backend with a kernel for it, for a caller with a plain way of its own.

    The arguments have to be those that the op takes. None: the reference would serve.
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
    """Run an op as `run` does when it comes to this backend.

    Raises:
        Refusal: The backend does not take the call.
    """
    module = _loaded.get(backend)
    if module is None:
        module = _loaded[backend] = importlib.import_module(_MODULES[backend], __package__)
    function = getattr(module, op, None)
    if function is None:
        raise Refusal("it has no such op")
    return function(*args, **kwargs)


def _order(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    chosen = forced()
    if chosen is not None:
        return (chosen,)
    if args and getattr(args[0], "is_cuda", False):
        autotune = importlib.import_module(".autotune", __package__)  # when a GPU first needs it
        return autotune.order(ask, op, args, kwargs)
    return ORDER
