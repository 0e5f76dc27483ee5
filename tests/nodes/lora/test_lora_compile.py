"""LoRAs on models that ComfyUI compiles: what they give, and how often anything is compiled."""

import dataclasses

import pytest
import torch

from fast_video_vae.tests.nodes import diffusion
from fast_video_vae.tests.nodes.diffusion import KIND, sample
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import ROUNDING, core, fast
from fast_video_vae.tests.nodes.vae.pairs import relative_error

pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.usefixtures("comfyui"),
    pytest.mark.filterwarnings("ignore"),  # torch's warnings about surrounding code
]


@pytest.fixture
def model(monkeypatch):
    """A model of one block, with an attention in whose way ComfyUI asks for no free memory."""
    import comfy.ldm.wan.model
    import torch._dynamo
    from comfy.ldm.modules.attention import attention_pytorch

    known = diffusion.KINDS[KIND]
    small = dataclasses.replace(known, settings=known.settings | {"num_layers": 1})
    monkeypatch.setitem(diffusion.KINDS, KIND, small)
    monkeypatch.setattr(comfy.ldm.wan.model, "optimized_attention", attention_pytorch)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield diffusion.load_model(KIND)
    torch._dynamo.reset()


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


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        ("stream", "eager"),
        pytest.param("bypass", "eager", marks=pytest.mark.slow),
        pytest.param("auto", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_new_strength_does_not_recompile(model, mode, backend):
    state = {key: value for key, value in diffusion.random_weights(KIND).items() if value.ndim < 3}
    lora = loras.save_lora(loras.lora_for(state, parts=("pairs",)), "linear.safetensors")
    without, before = sample(model), compiled(model, backend)
    expected = {strength: sample(core(model, lora, strength)) for strength in (0.8, -1.0)}
    for strength in (0.8, -1.0, 0.8):
        result = sample(fast(before, lora, strength, mode))
        assert relative_error(result, expected[strength]) < ROUNDING
        assert made() == (1, 1, 0)
    for _ in range(2):
        assert relative_error(sample(before), without) < ROUNDING
        assert made() == (2, 2, 0)  # the model without a LoRA
        assert relative_error(sample(fast(before, lora, 0.8, mode)), expected[0.8]) < ROUNDING


@pytest.mark.parametrize("first", ["the LoRA", "compiling"])
def test_a_first_lora_discards_no_compiled_code(model, first, monkeypatch):
    """The order of the nodes does not matter, nor whether the model ran before."""
    monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("everything is discarded"))
    before, lora = compiled(model), loras.lora(0)
    without, expected = sample(before), sample(core(model, lora, 0.8))
    patched = fast(before, lora, 0.8) if first == "compiling" else compiled(fast(model, lora, 0.8))
    for _ in range(2):
        assert relative_error(sample(patched), expected) < ROUNDING
    assert torch.equal(sample(before), without)
