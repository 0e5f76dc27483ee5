"""What the report says of weak LoRAs and of conventions, and what the modes make of them."""

import re

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.lora.lora_models import (
    apply,
    load_model,
    lora_for,
    random_weights,
    sample,
    save_lora,
    session_of,
    stack,
)

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

KIND = "wan21-t2v"


def weak(amount):
    """Return a LoRA whose deltas are `amount` of the weights."""
    tensors = lora_for(random_weights(KIND), parts=("pairs",), amount=amount)
    return save_lora(tensors, f"weak-{amount}.safetensors")


@pytest.fixture
def model():
    """A model that computes and is stored in bfloat16."""
    return stored(torch.bfloat16)


def stored(dtype):
    state = {key: value.bfloat16() for key, value in random_weights(KIND).items()}
    model = load_model(KIND, state, dtype=dtype)
    model.model.manual_cast_dtype = torch.bfloat16  # as on a GPU
    return model


def said(report):
    """Return the percentage and the number of layers in the line on small deltas; None: no line."""
    (line,) = [each for each in report.splitlines() if "small deltas" in each] or [None]
    if line is None:
        return None
    layers = re.search(r"for (\d+) layers", line)
    return int(re.search(r"(\d+) %|(\d+)%", line).group(0).rstrip(" %")), layers and int(layers[1])


# The mode, the size of the deltas, strength and blocks, and the percentage that is said.
SAID = [
    ("stream", 0.1, "1", "", None),
    ("merged", 0.003, "1", "", 93),
    ("stream", 0.001, "1", "", 53),
    ("merged", 0.0003, "1", "", 18),
    ("bypass", 0.001, "1", "", None),
    # The largest strength of a run counts.
    ("stream", 0.001, "100", "", None),
    ("stream", 0.001, "1,100", "", None),
    ("stream", 0.001, "1", "0=100", None),
]


@pytest.mark.parametrize(("mode", "amount", "strength", "blocks", "percent"), SAID)
def test_the_report_says_how_much_survives(model, mode, amount, strength, blocks, percent):
    models = [model] if mode == "merged" else [model, stored(torch.float8_e4m3fn)]
    for each in models:
        found = said(apply(each, stack(weak(amount), strength, blocks), mode)[1])
        if percent is None:
            assert found is None
        else:
            assert found[0] == pytest.approx(percent, abs=6)
    assert said(apply(load_model(KIND), stack(weak(amount), strength, blocks), mode)[1]) is None


def test_auto_bypasses_weak_loras_and_says_so(model):
    assert said(apply(model, stack(weak(0.1)), "auto")[1]) is None
    patched, report = apply(model, stack(weak(0.001)), "auto")
    sample(patched)
    session = session_of(patched)
    layers = session.bank.layers.values()
    linear = sum(layer.rank > 0 and len(layer.shape) == 2 for layer in layers)
    assert said(report) == (pytest.approx(53, abs=6), linear)
    assert session.counts.stream <= 2 * 2  # the patch embedding, which is a convolution
    assert session.counts.bypass > 0


@pytest.mark.parametrize("mode", ["auto", "merged"])
def test_the_report_names_differences_from_comfyuis_loader(mode):
    import folder_paths

    tensors = lora_for(random_weights(KIND), rank=8, parts=("pairs",))
    name = "diffusion_model.blocks.0.self_attn.q"
    tensors[f"{name}.diff"] = 0.1 * torch.randn(128, 128)
    plain = {key: value for key, value in tensors.items() if not key.endswith("alpha")}
    path = folder_paths.get_full_path("loras", save_lora(plain, "conventions.safetensors"))
    metadata = {"lora_adapter_metadata": '{"transformer.lora_alpha": 16, "transformer.r": 8}'}
    save_file(plain, path, metadata)
    report = apply(load_model(KIND), stack("conventions.safetensors"), mode)[1]
    assert "alpha 16 by its metadata, in ComfyUI's loader the rank" in report
    assert "1 weights have an adapter and a difference: both are applied" in report
    report = apply(load_model(KIND), stack(weak(0.1)), mode)[1]
    assert "in ComfyUI's loader" not in report
