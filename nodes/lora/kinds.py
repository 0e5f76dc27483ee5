"""What ComfyUI knows of LoRA files: names of parameters, and its adapters as functions of a weight.

A function keeps the form of an adapter (LoHa, LoKr, GLoRA, OFT, BOFT, LoCon); the bank stores its
tensors, and each call builds it again. ComfyUI logs that an adapter does not fit and goes on
without it. Here this is found beforehand: a new function is tried on a weight without values (on
"meta"). An error in a run, as of memory, is raised.
"""

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import comfy.lora
import comfy.weight_adapter
import torch
from comfy.model_patcher import ModelPatcher
from comfy.weight_adapter.base import WeightAdapterBase
from torch import Tensor, nn

from ...lora import NETWORK, Target, Targets, WeightFunction, describe, spell

# ComfyUI's endings of keys where they differ from our names of parts.
_ENDINGS = {"up": "lora_up.weight", "down": "lora_down.weight", "mid": "lora_mid.weight"}
_ENDINGS |= {part: f"{part}.weight" for part in ("a1", "a2", "b1", "b2")}

# Kinds whose deltas do not depend on the weight.
_ADDED = ("lora", "loha", "lokr")

# Parts whose values ComfyUI reads when it loads them.
_NUMBERS = ("alpha", "reshape_weight")

_targets: weakref.WeakKeyDictionary[nn.Module, Targets] = weakref.WeakKeyDictionary()


def targets_of(model: ModelPatcher) -> Targets:
    """Return the parameters of `model` by all names that ComfyUI and files use for them."""
    base = model.model
    if base not in _targets:
        shapes = {name: _shape(base, name, value) for name, value in base.named_parameters()}
        _targets[base] = Targets(shapes, _names_of_comfyui(base))
    return _targets[base]


def _shape(base: nn.Module, name: str, value: Tensor) -> tuple[int, ...]:
    """Return the shape of a weight in its product, whatever its storage format."""
    module = base.get_submodule(name.rpartition(".")[0])
    size = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if name.endswith(".weight") and None not in size:
        return size  # type: ignore[return-value]
    return tuple(getattr(value, "tensor_shape", value.shape))


def _names_of_comfyui(base: nn.Module) -> dict[str, Target]:
    """Return ComfyUI's further names of weights, such as those of fused layers."""
    try:
        known = comfy.lora.model_lora_keys_unet(base, {})
    except AttributeError:  # a network of another pack
        return {}
    names: dict[str, Target] = {}
    for name, key in known.items():
        if isinstance(key, str):
            names[name] = Target(key)
        elif len(key) == 2 and isinstance(key[1], tuple):
            names[name] = Target(*key)
    return {name: each for name, each in names.items() if each.key.startswith(NETWORK)}


def function_of(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> WeightFunction:
    """Return what ComfyUI does with the parts of a module, as `lora.OtherKinds`."""
    if "oft_blocks" in parts:  # the alpha of a rotation is its limit, 0: none; BOFT needs one
        parts = {"alpha": torch.tensor(0.0), **parts}
    grown = tuple(parts["reshape_weight"].tolist()) if "reshape_weight" in parts else shape
    try:
        parts = {name: _along(part, name, grown) for name, part in parts.items()}
        empty = {
            name: part if name in _NUMBERS else part.to("meta") for name, part in parts.items()
        }
        # The limit is compared with values, which "meta" has none of.
        empty |= {"alpha": torch.tensor(0.0)} if "alpha" in parts else {}
        _function(_adapter(empty)).apply(torch.empty(shape, device="meta"), 1.0)
    except Exception:
        raise ValueError(f"{describe(parts)} for a parameter of {spell(shape)}") from None
    # ComfyUI scales the weight by DoRA's magnitudes, and may pad it.
    fixed = not parts.keys() & {"dora_scale", "reshape_weight"}
    adapter = _adapter(parts)
    return _function(adapter, adds=fixed and adapter.name in _ADDED)


def _along(part: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return magnitudes or factors with the axes of the weight, which ComfyUI broadcasts."""
    if name not in ("dora_scale", "rescale"):
        return part
    is_out = name == "rescale" or (part.shape[:1] == shape[:1] and part.numel() == shape[0])
    sizes = [size if axis == (0 if is_out else 1) else 1 for axis, size in enumerate(shape)]
    return part.reshape(sizes)


def _adapter(parts: Mapping[str, Tensor]) -> WeightAdapterBase:
    """Return ComfyUI's adapter of all parts; a ValueError if it needs others."""
    file = {f"m.{_ENDINGS.get(part, part)}": tensor for part, tensor in parts.items()}
    alpha = file.pop("m.alpha").item() if "alpha" in parts else None
    dora_scale = file.pop("m.dora_scale", None)
    made = [
        kind.load("m", file, alpha, dora_scale, set()) for kind in comfy.weight_adapter.adapters
    ]
    (adapter,) = (each for each in made if each is not None)
    if adapter.loaded_keys != file.keys():
        raise ValueError("some parts are not used")
    return adapter


def _function(adapter: WeightAdapterBase, *, adds: bool = False) -> WeightFunction:
    tensors = tuple(each for each in adapter.weights if isinstance(each, Tensor))
    form = tuple(None if isinstance(each, Tensor) else (each,) for each in adapter.weights)
    function = functools.partial(_changed, kind=type(adapter), form=form)
    return WeightFunction(tensors, function, adds)


def _changed(
    weight: Tensor,
    tensors: tuple[Tensor, ...],
    strength: float,
    *,
    kind: type[WeightAdapterBase],
    form: tuple[tuple | None, ...],
) -> Tensor:
    """Return a weight with an adapter; `form` has its numbers, and None for each of `tensors`."""
    rest = iter(tensors)
    adapter = kind(set(), tuple(next(rest) if each is None else each[0] for each in form))
    patch = strength, adapter, 1.0, None, None
    with nullcontext() if torch.compiler.is_compiling() else _raised():
        return comfy.lora.calculate_weight([patch], weight, "a weight", weight.dtype)


@contextmanager
def _raised() -> Iterator[None]:
    """Raise the errors that ComfyUI's adapters catch and log in the block."""
    found, thread = list[BaseException](), threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        if record.funcName != "calculate_weight" or record.thread != thread:
            return True
        found.append(sys.exc_info()[1] or RuntimeError(record.getMessage()))
        return False

    logging.getLogger().addFilter(is_other)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(is_other)
    if found:
        raise found[0]
