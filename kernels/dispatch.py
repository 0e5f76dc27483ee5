"""Selection of the backend that runs a call, in one place.

Backends have functions with the names and signatures of the ops in `kernels/__init__.py`. They are
tried in the order of `ORDER`, fastest first; on a GPU in the order that `autotune.py` has measured.
A backend that does not support a call raises `Refusal` with the reason before it does any work, and
the next one is tried. A missing compiler or package is a reason too: found once, logged once,
remembered.

A candidate of the convolutions can have variants, such as tile sizes: "triton:2" is its third.
"""

import importlib
from types import ModuleType
from typing import Any

from torch import Tensor

from .backends import (
    CONVOLUTIONS,
    CONVOLUTIONS_TRIED,
    INT8_ORDER,
    ORDER,
    TRIED,
    convolution_order,
    forced,
)
from .convolution.compose import composed
from .convolution.fused import Fused
from .convolution.weight import ConvWeight
from .devices import device_kind
from .errors import BackendError, Refusal

_MODULES = {
    "triton": ".triton_ops.ops",
    "cuda": ".cuda_ops.ops",
    "native": ".native_ops",
    "reference": ".reference",
    "aten": ".convolution.aten",
    "kitchen": ".convolution.kitchen",
    "sliced": ".convolution.sliced",
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
    name, _, variant = backend.partition(":")
    module = _module(name)
    function = getattr(module, op, None)
    if function is None:
        raise Refusal("the backend has no such op")
    if not op.startswith("conv"):
        return function(*args, **kwargs)
    if variant:
        kwargs["variant"] = int(variant)
    x, weight, *_ = args
    norm = kwargs.get("gamma") is not None
    fused = module.fuses(x, weight, kwargs["stride"], kwargs["padding"], norm=norm)
    return composed(function, fused, run, *args, **kwargs)


def fusion(
    x: Tensor,
    weight: ConvWeight,
    stride: tuple[int, ...],
    padding: tuple[int, int],
    *,
    norm: bool,
) -> Fused:
    """Return what the candidate that runs such convolutions does in its own pass.

    Args:
        x: `[B, C, T, H, W]` or `[N, C, H, W]`.
        weight: `[C_out, C, ...]`.
        stride: Stride of each dimension of the kernel.
        padding: Padding of height and width.
        norm: The calls have a `gamma`.

    Returns:
        What is fused.
    """
    options = {"stride": stride, "padding": padding, "gamma": norm or None}
    order = _order(f"conv{x.ndim - 2}d", (x, weight), options)
    return _module(order[0].partition(":")[0]).fuses(x, weight, stride, padding, norm=norm)


def _module(name: str) -> Any:  # noqa: ANN401, a module
    module = _loaded.get(name)
    if module is None:
        module = _loaded[name] = importlib.import_module(_MODULES[name], __package__)
    return module


def _order(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    convolves, coded = op.startswith("conv"), op == "int8_conv3d"
    chosen = forced()
    if chosen is not None and chosen in (CONVOLUTIONS if convolves or coded else ORDER):
        return (chosen,)
    if coded:
        return INT8_ORDER
    x = args[0] if args else None
    kind = device_kind(x.device) if isinstance(x, Tensor) else "cpu"
    if kind in (CONVOLUTIONS_TRIED if convolves else TRIED):
        # Imported with the first GPU call.
        trial = importlib.import_module(
            ".convolution.choice" if convolves else ".autotune", __package__
        )
        return trial.order(ask, op, args, kwargs)
    return convolution_order(op, kind) if convolves else ORDER
