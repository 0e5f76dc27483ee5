"""The modules of the backends, imported when a call first needs them."""

import importlib
from types import ModuleType
from typing import Any

_MODULES = {
    "triton": ".triton_ops.ops",
    "cuda": ".cuda_ops.ops",
    "native": ".native_ops",
    "reference": ".reference",
    "hopper": ".cuda_ops.hopper",
    "aten": ".convolution.aten",
    "sliced": ".convolution.sliced",
}

_loaded: dict[str, ModuleType] = {}


def module_of(name: str) -> Any:  # noqa: ANN401, a module
    """Return the module of a backend, imported when first needed; "triton:2" is in triton's."""
    module = _loaded.get(name)
    if module is None:
        path = _MODULES[name.partition(":")[0]]
        module = _loaded[name] = importlib.import_module(path, __package__)
    return module
