"""The LoRA nodes in a running ComfyUI, over HTTP: their inputs, errors, and files that change."""

import pickle

import pytest
import torch
from safetensors.torch import save, save_file

from fast_video_vae.tests.nodes.diffusion import KIND, random_weights
from fast_video_vae.tests.nodes.lora.lora_models import lora_for
from fast_video_vae.tests.nodes.server import PromptError, Workflow

pytestmark = pytest.mark.comfyui


def apply(*entries, mode="auto"):
    """A workflow that shows the report of a stack: (file, strength, blocks) each."""
    workflow, stack = Workflow(), {}
    model = workflow.add("UNETLoader", unet_name="expert-0.safetensors", weight_dtype="default")
    for name, strength, blocks in entries:
        given = {"lora_name": name, "strength": strength, "blocks": blocks, **stack}
        stack = {"stack": workflow.add("FastVAE_LoraStack", **given)}
    node, _ = workflow.add("FastVAE_ApplyLora", model=model, mode=mode, **stack)
    workflow.add("PreviewAny", source=[node, 1])
    return workflow


def test_a_report_lists_the_keys_and_what_differs_from_comfyuis_loader(expert_server):
    """A replaced file is read again, and a missing one is an error."""
    state, lora = random_weights(KIND), expert_server.models("loras") / "lora.safetensors"
    save_file(lora_for(state), lora)
    workflow = apply((lora.name, "0.8", ""), (lora.name, "-0.5", "1"))

    def report():
        ((text,),) = (shown["text"] for shown in expert_server.run(workflow).values())
        return text

    text = report()
    assert text.startswith("lora.safetensors: 120 keys applied")
    assert text.endswith("auto")
    assert "in ComfyUI's loader" not in text
    assert "lora.safetensors is used 2 times; the strengths add up" in text
    tensors = lora_for(state, rank=8, parts=("pairs",))
    tensors = {key: value for key, value in tensors.items() if not key.endswith("alpha")}
    tensors["diffusion_model.blocks.0.self_attn.q.diff"] = torch.ones(128, 128)
    metadata = {"lora_adapter_metadata": '{"transformer.lora_alpha": 16, "transformer.r": 8}'}
    save_file(tensors, lora, metadata)
    text = report()
    assert text.startswith("lora.safetensors: 55 keys applied")
    assert "alpha 16 by its metadata, in ComfyUI's loader the rank" in text
    assert "1 weights have an adapter and a difference: both are applied" in text
    lora.unlink()
    with pytest.raises(PromptError):
        expert_server.run(workflow)


def test_the_inputs_of_the_nodes_in_their_order(expert_server):
    for name, defaults in {
        "LoraStack": {"lora_name": None, "strength": "1.0", "blocks": "", "stack": None},
        "ApplyLora": {"model": None, "stack": None, "mode": "auto", "phase": "auto"},
    }.items():
        (info,) = expert_server.get(f"/object_info/FastVAE_{name}").values()
        inputs = info["input"]["required"] | info["input"]["optional"]
        found = [(each, more.get("default")) for each, (_, more) in inputs.items()]
        assert found == [*defaults.items()]
    assert inputs["mode"][1]["options"] == ["auto", "stream", "bypass", "merged"]


# The error, and the content of the file made from the model's weights.
UNUSABLE = {
    "stack: bad.safetensors is a pickle": lambda _: pickle.dumps({"a": 1}),
    "stack: bad.safetensors is not a complete safetensors file": lambda state: save(state)[:-1],
    "stack: nothing in bad.safetensors is for this model": lambda _: save(
        {f"transformer.proj.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    ),
    "bad.safetensors is for another model": lambda state: save(
        lora_for({key: torch.cat([value, value]) for key, value in state.items()})
    ),
}


@pytest.mark.parametrize(("said", "mode"), [*zip(UNUSABLE, ["auto", "merged"] * 2, strict=True)])
def test_an_unusable_file_is_a_one_line_error_of_the_node(expert_server, said, mode):
    path = expert_server.models("loras") / "bad.safetensors"
    path.write_bytes(UNUSABLE[said](random_weights(KIND)))
    with pytest.raises(PromptError) as caught:
        expert_server.run(apply((path.name, "1", ""), mode=mode))
    message = caught.value.messages[-1][1]["exception_message"].strip()
    assert said in message
    assert "\n" not in message
