"""LoRAs on models that ComfyUI compiles: what they give, and how often anything is compiled."""

import dataclasses

import pytest
import torch

from fast_video_vae.tests.nodes.lora import lora_models
from fast_video_vae.tests.nodes.lora.lora_models import (
    KINDS,
    ROUNDING,
    core,
    fast,
    load_model,
    lora_for,
    random_weights,
    relative_error,
    sample,
    save_lora,
)

pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.usefixtures("comfyui"),
    pytest.mark.filterwarnings("ignore"),  # torch's warnings about surrounding code
]

KIND = "wan21-t2v"


@pytest.fixture
def model(monkeypatch):
    """A model of one block, with an attention in whose way ComfyUI asks for no free memory."""
    import comfy.ldm.wan.model
    import torch._dynamo
    from comfy.ldm.modules.attention import attention_pytorch

    small = dataclasses.replace(KINDS[KIND], settings=KINDS[KIND].settings | {"num_layers": 1})
    monkeypatch.setitem(lora_models.KINDS, KIND, small)
    monkeypatch.setattr(comfy.ldm.wan.model, "optimized_attention", attention_pytorch)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield load_model(KIND)
    torch._dynamo.reset()


@pytest.fixture
def lora(model):
    """A LoRA of linear layers only."""
    return save_lora(lora_for(_linear(), seed=0, parts=("pairs",)), "linear.safetensors")


def _linear():
    return {key: value for key, value in random_weights(KIND).items() if value.ndim < 3}


def compiled(model, backend="eager"):
    """Compile as TorchCompileModel does, which only has backends for GPUs."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    clone = model.clone()
    options = {"guard_filter_fn": skip_torch_compile_dict}
    set_torch_compile_wrapper(model=clone, backend=backend, options=options)
    return clone


def made():
    """Frames and graphs that were compiled so far, and where a graph ended early."""
    counters = torch._dynamo.utils.counters
    return (
        counters["frames"]["ok"],
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
    )


@pytest.mark.parametrize("mode", ["stream", pytest.param("bypass", marks=pytest.mark.slow)])
def test_a_new_strength_does_not_recompile(model, lora, mode):
    without, before = sample(model), compiled(model)
    expected = {strength: sample(core(model, lora, strength)) for strength in (0.8, -1.0)}
    for strength in (0.8, -1.0, 0.8):
        result = sample(fast(before, lora, strength, mode))
        assert relative_error(result, expected[strength]) < ROUNDING
        assert made() == (1, 1, 0)
    for _ in range(2):
        assert relative_error(sample(before), without) < ROUNDING
        assert made() == (2, 2, 0)  # the model without a LoRA
        assert relative_error(sample(fast(before, lora, 0.8, mode)), expected[0.8]) < ROUNDING


def test_a_lora_can_be_applied_before_compilation(model, lora):
    """The order of the nodes does not matter, nor whether the model ran before."""
    without = sample(compiled(model))
    expected = sample(core(model, lora, 0.8))
    patched = compiled(fast(model, lora, 0.8))
    for _ in range(2):
        assert relative_error(sample(patched), expected) < ROUNDING
    assert relative_error(sample(compiled(model)), without) < ROUNDING


def test_a_first_lora_discards_no_compiled_code(model, monkeypatch):
    """Of any model of the process; layers with a LoRA are compiled again for it alone."""
    monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("everything is discarded"))
    before, lora = compiled(model), lora_models.lora(0, KIND)
    without = sample(before)
    expected = sample(core(model, lora, 0.8))
    assert relative_error(sample(fast(before, lora, 0.8)), expected) < ROUNDING
    assert torch.equal(sample(before), without)


@pytest.mark.slow
def test_inductor_compiles_a_model_with_a_lora(model, lora):
    before, counts = compiled(model, "inductor"), []
    for strength in (0.8, 0.3):
        expected = sample(core(model, lora, strength))
        assert relative_error(sample(fast(before, lora, strength)), expected) < ROUNDING
        counts.append(made())
    assert counts[0] == counts[1]
