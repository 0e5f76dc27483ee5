"""How much of the effect of a LoRA layers keep in bf16: ours, and ComfyUI's own."""

from contextlib import nullcontext

import torch

from fast_video_vae.tests.nodes.lora.lora_models import (
    FP8,
    core,
    fast,
    in_blocks,
    load_model,
    lora_for,
    quantised,
    quantised_layers,
    random_weights,
    sample,
    save_lora,
    session_of,
)

KIND = "wan21-t2v"


def fp8_errors():
    """For each way the errors of what a LoRA of 1 % of fp8 weights adds, by layer."""
    state = {key: value.bfloat16() for key, value in random_weights(KIND).items()}
    changes = _changes(quantised(state, FP8, in_blocks), 0.01, "stream", "core", "bypass")
    return {
        way: [((change - delta).norm() / delta.norm()).item() for change, delta in each]
        for way, each in changes.items()
    }


def weak_shares(amount):
    """For stream and ComfyUI's loader, the shares of deltas of `amount` that bf16 weights keep."""
    state = {key: value.bfloat16() for key, value in random_weights(KIND).items()}
    return {
        way: [((change * delta).sum() / delta.square().sum()).item() for change, delta in each]
        for way, each in _changes(state, amount, "stream", "core").items()
    }


def _changes(file, amount, *ways):
    """For each way, the change of the weight of each layer by a LoRA, and the delta."""
    tensors = lora_for(random_weights(KIND), parts=("pairs",), amount=amount)
    lora = save_lora(tensors, "small.safetensors")
    # Without a bias, the output of a layer for the unit matrix is its weight.
    file = {
        key: torch.zeros_like(value) if key.endswith("bias") else value
        for key, value in file.items()
    }
    found = {}
    for way in ways:
        model = load_model(KIND, file, dtype=torch.bfloat16)
        model.model.manual_cast_dtype = torch.bfloat16  # as on a GPU
        if way == "bypass":  # what it adds, without the rounding of the output
            for layer in quantised_layers(model).values():
                layer.weight._qdata.zero_()
        own = _weights(model)
        patched = core(model, lora) if way == "core" else fast(model, lora, 1.0, way)
        sample(patched)
        device = torch.device("cpu")
        call = session_of(patched).call(model.model, device) if way != "core" else nullcontext()
        with call:
            used = _weights(model)
        found[way] = []
        for name in own:
            up, down = (tensors[f"{name}.lora_{part}.weight"].double() for part in ("up", "down"))
            found[way].append((used[name] - own[name], up @ down / 2))
    return found


def _weights(model):
    return {
        name: layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).double().T
        for name, layer in model.model.named_modules()
        if ".blocks." in name and hasattr(layer, "in_features")
    }
