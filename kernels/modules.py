"""The modules of the backends, imported when a call first needs them."""

import importlib
from types import ModuleType
from typing import Any

_MODULES = {
    "triton": ".triton_ops.ops",
    "cuda": ".cuda_ops.ops",
    "native": ".native_ops",
    "reference": ".reference",
    "aten": ".convolution.aten",
    "sliced": ".convolution.sliced",
}

_loaded: dict[str, ModuleType] = {}


def module_of(name: str) -> Any:  # noqa: ANN401, a module
    """Return the module with the functions of a backend, imported when it is first needed.

    Args:
        name: Name of the backend; a variant such as "triton:2" has the functions of its backend.

    Returns:
        The module.
    """
    module = _loaded.get(name)
    if module is None:
        path = _MODULES[name.partition(":")[0]]
        module = _loaded[name] = importlib.import_module(path, __package__)
    return module
