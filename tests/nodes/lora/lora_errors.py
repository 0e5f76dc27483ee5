"""How much of a LoRA's effect is lost on a model of scaled fp8: ours, and ComfyUI's own."""

import pytest
import torch
from torch.nn import functional as F

from fast_video_vae.tests.nodes.lora.lora_models import (
    core,
    fast,
    load_model,
    lora_for,
    random_weights,
    sample,
    save_lora,
    session_of,
)

KIND = "wan21-t2v"


def fp8(state):
    """A file of scaled fp8: the linear layers of the blocks, with a scale for each."""
    quantised = dict(state, scaled_fp8=torch.zeros(1, dtype=torch.float8_e4m3fn))
    for key, value in state.items():
        if key.startswith("blocks.") and key.endswith(".weight") and value.ndim == 2:
            scale = value.abs().max().float() / 448
            quantised[key] = (value / scale).to(torch.float8_e4m3fn)
            quantised[key.replace(".weight", ".scale_weight")] = scale
    return quantised


def quantised_layers(model):
    return {
        name: module
        for name, module in model.model.named_modules()
        if type(getattr(module, "weight", None)).__name__ == "QuantizedTensor"
    }


def fp8_errors():
    """For each way the errors of what a LoRA of 1 % of the weights adds, by layer."""
    state = random_weights(KIND)
    file = fp8({key: value.bfloat16() for key, value in state.items()})
    errors = {"stream": [], "bypass": [], "core": []}
    generator = torch.Generator().manual_seed(0)
    for mode, call, layer, theirs, delta in _layers(state, file, 0.01, "stream", "bypass"):
        x = torch.randn(64, layer.in_features, generator=generator).bfloat16()
        expected, own = x.double() @ delta.T, _used(layer, x)
        with call:
            if mode == "bypass":
                errors[mode].append(_error(_added(layer, x), expected))
                continue
            effect = x.double() @ (_used(layer, x) - own).T
        errors[mode].append(_error(effect, expected))
        effect = x.double() @ (_used(theirs, x) - own).T
        errors["core"].append(_error(effect, expected))
    return errors


def weak_shares(amount):
    """For stream and ComfyUI's loader, the shares of deltas of `amount` that bf16 weights keep."""
    state = random_weights(KIND)
    file = {key: value.bfloat16() for key, value in state.items()}
    shares = {"stream": [], "core": []}
    for _, call, layer, theirs, delta in _layers(state, file, amount, "stream"):
        x = torch.zeros(1, layer.in_features, dtype=torch.bfloat16)
        own = _used(layer, x)
        with call:
            shares["stream"].append(_share(_used(layer, x) - own, delta))
        shares["core"].append(_share(_used(theirs, x) - own, delta))
    return shares


def _layers(state, file, amount, *modes):
    """Yield a mode, a call of ours, a linear layer of the blocks, that of core, and the delta."""
    import comfy.model_management

    tensors = lora_for(state, parts=("pairs",), amount=amount)
    lora = save_lora(tensors, "small.safetensors")
    model, other = (load_model(KIND, file, dtype=torch.bfloat16) for _ in range(2))
    for each in (model, other):
        each.model.manual_cast_dtype = torch.bfloat16  # as on a GPU
    merged = core(other, lora)
    comfy.model_management.load_models_gpu([merged])
    layers = [
        (name, layer)
        for name, layer in model.model.named_modules()
        if ".blocks." in name and hasattr(layer, "in_features")
    ]
    for mode in modes:
        patched = fast(model, lora, 1.0, mode)
        sample(patched)
        session = session_of(patched)
        assert session.bank.flat.dtype == torch.bfloat16
        for name, layer in layers:
            up, down = (tensors[f"{name}.lora_{part}.weight"].double() for part in ("up", "down"))
            call = session.call(model.model, torch.device("cpu"))
            yield mode, call, layer, other.model.get_submodule(name), up @ down / 2


def _used(layer, x):
    """The weight that a call of a layer multiplies with."""
    linear, found = F.linear, []

    def product(x, weight, bias=None):
        if weight.shape == (layer.out_features, layer.in_features):
            found.append(weight.double())
        return linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", product)
        layer(x)
    return found[0]


def _added(layer, x):
    """Return what the LoRA adds to the output of a layer."""
    from fast_video_vae.lora.apply import JoinedPairs

    bypass, found = JoinedPairs.bypass, []

    def addition(pairs, y, x):
        found.append(bypass(pairs, torch.zeros_like(y), x).double())
        return bypass(pairs, y, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JoinedPairs, "bypass", addition)
        layer(x)
    return found[0]


def _share(added, delta):
    return ((added * delta).sum() / delta.square().sum()).item()


def _error(result, expected):
    return ((result - expected).norm() / expected.norm()).item()
