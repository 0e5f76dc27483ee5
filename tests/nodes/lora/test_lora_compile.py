"""LoRAs on models that ComfyUI compiles: what they give, and how often anything is compiled."""

import dataclasses

import pytest

from fast_video_vae.tests.nodes import diffusion
from fast_video_vae.tests.nodes.diffusion import KIND, sample
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import ROUNDING, core, fast, relative_error


@pytest.mark.comfyui
@pytest.mark.filterwarnings("ignore")  # torch's warnings about surrounding code
@pytest.mark.parametrize("mode", ["stream", "bypass"])
def test_a_lora_on_a_compiled_model_recompiles_nothing(comfyui, mode, monkeypatch):
    """Neither another strength nor the first LoRA, whichever node is first in the workflow."""
    import comfy.ldm.wan.model
    import torch._dynamo
    from comfy.ldm.modules.attention import attention_pytorch
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    def compiled(model):  # as TorchCompileModel does, which only has backends for GPUs
        clone, options = model.clone(), {"guard_filter_fn": skip_torch_compile_dict}
        set_torch_compile_wrapper(model=clone, backend="eager", options=options)
        return clone

    def made():  # frames and graphs that were compiled, and where a graph ended early
        counts = torch._dynamo.utils.counters
        frames, graphs = counts["frames"]["ok"], counts["stats"]["unique_graphs"]
        return frames, graphs, sum(counts["graph_break"].values())

    # One block, whose attention does not ask for the free memory.
    known = diffusion.KINDS[KIND]
    small = dataclasses.replace(known, settings=known.settings | {"num_layers": 1})
    monkeypatch.setitem(diffusion.KINDS, KIND, small)
    monkeypatch.setattr(comfy.ldm.wan.model, "optimized_attention", attention_pytorch)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    state = {key: value for key, value in diffusion.random_weights(KIND).items() if value.ndim < 3}
    lora = loras.save_lora(loras.lora_for(state, parts=("pairs",)), "linear.safetensors")
    model = diffusion.load_model(KIND)
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
    monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("everything is discarded"))
    model = diffusion.load_model(KIND)
    first = compiled(model)
    without, after = sample(first), compiled(fast(model, lora, 0.8, mode))
    for patched in (after, fast(first, lora, 0.8, mode)):
        assert relative_error(sample(patched), expected[0.8]) < ROUNDING
    assert torch.equal(sample(first), without)
    torch._dynamo.reset()
