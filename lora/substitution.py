"""Ways to give a module other parameters for some time, by its kind.

Each has `attach`, which applies functions of parameters until `detach`. A lazy one computes them
when the module reads a parameter, so they cost nothing if it does not.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .precision import is_plain

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Names of the lists of functions.
_LISTS = {"weight": "weight_function", "bias": "bias_function"}

# Modules look for parameters, buffers and submodules first, which takes longer than all else here.
_set = object.__setattr__

# Functions of a parameter `[...]` by its name, "weight" or "bias".
Changes = Mapping[str, Callable[[Tensor], Tensor]]


class FunctionLists:
    """For modules that apply the functions of a list to a parameter that they have cast."""

    is_lazy: ClassVar[bool] = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # The lists of the module and ours in their place, by attribute.
        self._lists: dict[str, tuple[list, list]] = {}

    def attach(self, changes: Changes) -> None:
        """Append `changes` to the lists."""
        for name, change in changes.items():
            place = _LISTS[name]
            own = getattr(self._module, place, None)
            if isinstance(own, list):
                ours = [*own, change]
                self._lists[place] = own, ours
                _set(self._module, place, ours)

    def detach(self) -> None:
        """Restore the lists, with what others have added to them."""
        for place, (own, ours) in self._lists.items():
            if getattr(self._module, place) is ours:  # otherwise another list is in its place
                added = ours[len(own) + 1 :]
                _set(self._module, place, [*own, *added] if added else own)
        self._lists = {}


# They have lists too, which some of them read and others do not.
class Unpacking(FunctionLists):
    """For modules that unpack with a method `get_weight`, as those of ComfyUI-GGUF do."""

    METHOD: ClassVar[str] = "get_weight"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._others: dict[str, Any] = {}  # another pack's method of this module
        self._unpacked: Any = None

    def attach(self, changes: Changes) -> None:
        """Change what the method returns, and append `changes` to the lists."""
        super().attach(changes)
        unpack, module = getattr(self._module, self.METHOD), self._module
        self._others = {k: each for k, each in module.__dict__.items() if k == self.METHOD}

        def unpacked(packed: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:  # noqa: ANN401
            value = unpack(packed, *args, **kwargs)
            change = changes.get(_name_of(module, packed) or "")
            return value if change is None or value is None else change(value)

        module.__dict__[self.METHOD] = self._unpacked = unpacked

    def detach(self) -> None:
        """Restore the method and the lists."""
        known = self._module.__dict__
        if self._unpacked is not None and known.get(self.METHOD) is self._unpacked:
            del known[self.METHOD]
            known.update(self._others)
        self._unpacked = None
        super().detach()


class Parameters:
    """For all other modules; parameters that are not plain floating point stay."""

    is_lazy: ClassVar[bool] = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own: dict[str, nn.Parameter | None] = {}

    def attach(self, changes: Changes) -> None:
        """Replace parameters by the results of `changes`."""
        self.detach()  # a forward that failed has left them
        for name, change in changes.items():
            own = self._module._parameters.get(name)
            if own is not None and own.dtype in _FLOATS:
                self._own[name] = own
                self._module._parameters[name] = nn.Parameter(change(own.detach()), False)

    def detach(self) -> None:
        """Restore the parameters."""
        self._module._parameters.update(self._own)
        self._own = {}


def substitution_of(module: nn.Module) -> FunctionLists | Parameters:
    """Return the way to give `module` other parameters."""
    if not isinstance(getattr(module, "weight_function", None), list):
        return Parameters(module)
    weight = getattr(module, "weight", None)
    is_packed = isinstance(weight, Tensor) and not is_plain(weight)
    if is_packed and callable(getattr(type(module), Unpacking.METHOD, None)):
        return Unpacking(module)
    return FunctionLists(module)


# Compiled code checks the lengths of the lists that the module's forward has read.
def is_seen_by_compiled_code(module: nn.Module) -> bool:
    """Return whether code that was compiled before an `attach` checks what it changes."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or type(substitution_of(module)) is not FunctionLists:
        return False
    is_float = is_plain(weight) and weight.is_floating_point()
    forward = getattr(module.forward, "__func__", module.forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "weight_function" in names and (is_float or type(weight).__module__.startswith("comfy"))


def _name_of(module: nn.Module, packed: Tensor) -> str | None:
    """Return the name of the parameter that `packed` is, or was before a copy; None: unknown."""
    if packed.ndim > 1 or module._parameters.get("bias") is None:
        return "weight"
    for name in ("weight", "bias"):
        own = module._parameters.get(name)
        if own is not None and own.data_ptr() == packed.data_ptr():
            return name
    weight = module._parameters.get("weight")
    return "bias" if weight is not None and weight.ndim > 1 else None
