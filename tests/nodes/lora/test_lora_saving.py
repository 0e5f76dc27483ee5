"""What ComfyUI's nodes save of a model with LoRAs."""

from pathlib import Path

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.lora.lora_errors import fp8
from fast_video_vae.tests.nodes.lora.lora_models import (
    ALL,
    EFFECT,
    ROUNDING,
    UNMERGED,
    apply,
    bits,
    core,
    fast,
    load_model,
    lora,
    lora_for,
    random_weights,
    relative_error,
    sample,
    save_lora,
    stack,
)

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

KIND = "wan21-t2v"


def saved(model, output):
    """Return the model that ModelSave saves, loaded again."""
    import comfy.sd
    from comfy_extras.nodes_model_merging import ModelSave

    node = ModelSave()
    node.output_dir = str(output)
    node.save(model, "saved")
    (path,) = Path(output).rglob("saved*.safetensors")
    loaded = comfy.sd.load_diffusion_model(str(path))
    path.unlink()
    return loaded


@pytest.mark.parametrize("mode", UNMERGED)
def test_a_saved_model_has_the_lora(mode, output):
    model = load_model(KIND)
    without, before = sample(model), bits(model)
    name = save_lora(lora_for(random_weights(KIND), parts=ALL), "all.safetensors")
    patched = fast(model, name, 0.8, mode)
    expected = sample(patched)
    for each in (patched, patched.clone()):
        again = saved(each, output)
        assert bits(model) == before
        assert not model.backup
        assert relative_error(sample(again), expected) < ROUNDING
    assert relative_error(expected, without) > EFFECT
    assert torch.equal(sample(patched), expected)
    assert torch.equal(sample(model), without)


def test_two_applied_stacks_are_saved_and_other_loras_too(output):
    model = core(load_model(KIND), lora(2), 0.5)
    first = fast(model, lora(0), 0.8)
    second = apply(first, stack(lora(1), -0.5))[0]
    for each in (first, second):
        assert relative_error(sample(saved(each, output)), sample(each)) < ROUNDING
    assert relative_error(sample(saved(model, output)), sample(model)) < ROUNDING
    none = apply(second.clone(), stack(lora(1), 0))[0]
    assert relative_error(sample(saved(none, output)), sample(second)) < ROUNDING


@pytest.mark.parametrize("strength", ["0.9,0.8", "1@0-0.5", "0;1", "1;0.3"])
def test_a_strength_that_changes_is_not_saved(strength, output):
    patched = fast(load_model(KIND), lora(0), strength)
    why = f"strength {strength} changes during a run; set one number"
    with refused(f"cannot be saved with the model: {why}"):
        saved(patched, output)
    assert not list(Path(output).rglob("*.safetensors"))


def test_the_phase_of_a_model_is_saved(output):
    model = load_model(KIND)
    for phase, strength in (("high", 1.0), ("low", 0.3)):
        patched = apply(model, stack(lora(0), "1;0.3"), "auto", phase)[0]
        expected = sample(core(model, lora(0), strength))
        assert relative_error(sample(saved(patched, output)), expected) < ROUNDING
        merged = apply(model, stack(lora(0), "1;0.3"), "merged", phase)[0]
        assert relative_error(sample(merged), expected) < ROUNDING


def test_quantised_weights_are_not_saved(output):
    state = random_weights(KIND)
    patched = fast(load_model(KIND, fp8(state)), lora(0))
    with refused(r"cannot be saved with the model: \S+ is QuantizedTensor"):
        saved(patched, output)
