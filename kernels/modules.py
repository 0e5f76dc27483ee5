"""The modules of the backends, imported when a call first needs them."""

import importlib
from typing import Any

from torch import Tensor

from .backends import Launch
from .errors import Refusal

# Where `refuse` and `launches` of each backend are: the first refuses a device or dtype before the
# second imports anything that is optional.
_MODULES = {
    "triton": ".triton_ops.ops",
    "cuda": ".cuda_ops.ops",
    "native": ".native_ops",
    "reference": ".reference",
    "hopper": ".cuda_ops.hopper",
    "aten": ".convolution.aten",
    "sliced": ".convolution.sliced",
}

_loaded: dict[str, Any] = {}


def backend(name: str) -> Any:  # noqa: ANN401, a module
    """Return the module of a backend, imported when first needed."""
    module = _loaded.get(name)
    if module is None:
        module = _loaded[name] = importlib.import_module(_MODULES[name], __package__)
    return module


def launch_of(name: str, op: str, x: Tensor) -> Launch:
    """Return the launch of an op by a backend, or refuse the device or dtype of `x` `[...]`."""
    module = backend(name)
    module.refuse(x)
    launch = module.launches().get(op)
    if launch is None:
        raise Refusal("the backend has no such op")
    return launch


def ask(name: str, op: str, *args: Any) -> Tensor:  # noqa: ANN401, those of `SIGNATURES`
    """Run an op on one backend, or raise its `Refusal`."""
    return launch_of(name, op, args[0])(*args)
