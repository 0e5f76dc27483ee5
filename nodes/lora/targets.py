"""The parameters of a ComfyUI MODEL by all names that LoRA files use for them."""

import weakref

import comfy.lora
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...lora import NETWORK, Target, Targets

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
    module = base.get_submodule(name.rpartition(".")[0]) if "." in name else base
    size = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if name.endswith(".weight") and None not in size:
        return size  # type: ignore[return-value]
    return tuple(getattr(value, "tensor_shape", value.shape))


def _names_of_comfyui(base: nn.Module) -> dict[str, Target]:
    """Return ComfyUI's further names of weights, such as those of fused layers."""
    names: dict[str, Target] = {}
    try:
        known = comfy.lora.model_lora_keys_unet(base, {})
    except AttributeError:  # a network of another pack
        return names
    for name, key in known.items():
        if isinstance(key, str):
            names[name] = Target(key)
        elif len(key) == 2 and isinstance(key[1], tuple):
            names[name] = Target(key[0], key[1])
    return {name: target for name, target in names.items() if target.key.startswith(NETWORK)}
