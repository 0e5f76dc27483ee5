"""How much of the effect of a LoRA layers keep in bf16: ours, and ComfyUI's own."""

import contextlib
import functools

import pytest
import torch

from fast_video_vae.tests.nodes import diffusion
from fast_video_vae.tests.nodes.diffusion import KIND
from fast_video_vae.tests.nodes.lora import lora_models as loras


def fp8_errors():
    """For each way the errors of what a LoRA of 1 % of fp8 weights adds, by layer."""
    state = {key: value.bfloat16() for key, value in diffusion.random_weights(KIND).items()}
    file = diffusion.quantised(state, diffusion.FP8, lambda key: key.startswith("blocks."))
    return {
        way: [((change - delta).norm() / delta.norm()).item() for change, delta in each]
        for way, each in _changes(file, 0.01, "stream", "core", "bypass").items()
    }


def weak_shares(amount):
    """For stream and ComfyUI's loader, the shares of deltas of `amount` that bf16 weights keep."""
    state = {key: value.bfloat16() for key, value in diffusion.random_weights(KIND).items()}
    return {
        way: [((change * delta).sum() / delta.square().sum()).item() for change, delta in each]
        for way, each in _changes(state, amount, "stream", "core").items()
    }


def _changes(file, amount, *ways):
    """For each way, the change of the weight of each layer by a LoRA, and the delta."""
    tensors = loras.lora_for(diffusion.random_weights(KIND), parts=("pairs",), amount=amount)
    lora = loras.save_lora(tensors, "small.safetensors")
    found, device = {}, torch.device("cpu")
    for way in ways:
        model = diffusion.load_model(KIND, file, dtype=torch.bfloat16)
        model.model.manual_cast_dtype = torch.bfloat16  # as on a GPU
        if way == "bypass":  # what it adds, without the rounding of the output
            for layer in diffusion.quantised_layers(model).values():
                layer.weight._qdata.zero_()
        own = _weights(model)
        made = loras.core if way == "core" else functools.partial(loras.fast, mode=way)
        diffusion.sample(patched := made(model, lora))
        ours = contextlib.nullcontext
        if way != "core":
            ours = functools.partial(loras.session_of(patched).call, model.model, device)
        with ours():
            used = _weights(model)
        found[way] = []
        for name in own:
            up, down = (tensors[f"{name}.lora_{part}.weight"].double() for part in ("up", "down"))
            found[way].append((used[name] - own[name], up @ down / 2))
    return found


def _weights(model):
    """The weights that layers of the blocks multiply with."""
    found = {}
    for name, layer in model.model.named_modules():
        if ".blocks." in name and hasattr(layer, "in_features"):
            unit = torch.eye(layer.in_features, dtype=torch.bfloat16)
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(layer._parameters, "bias", None)
                found[name] = layer(unit).double().T
    return found
