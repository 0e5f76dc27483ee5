"""The LoRA nodes in a running ComfyUI, over HTTP: their inputs, errors, and files that change."""

import pickle

import pytest
import torch
from safetensors.torch import save, save_file

from fast_video_vae.tests.nodes.lora.lora_models import lora_for, random_weights
from fast_video_vae.tests.nodes.server import PromptError, Workflow
from fast_video_vae.tests.products import each_value_once

pytestmark = pytest.mark.comfyui

KIND = "wan21-t2v"


@pytest.fixture(scope="module")
def state(server, comfyui):
    """A small model, in a file where the server finds it."""
    weights = random_weights(KIND)
    save_file(weights, server.models("diffusion_models") / "small.safetensors")
    return weights


@pytest.fixture
def lora(server, state):
    """A LoRA of the model, in a file of a test alone."""
    path = server.models("loras") / "lora.safetensors"
    save_file(lora_for(state), path)
    return path


def apply(*entries, mode="auto"):
    """A workflow that shows the report of a stack: (file, strength, blocks) each."""
    workflow, stack = Workflow(), {}
    model = workflow.add("UNETLoader", unet_name="small.safetensors", weight_dtype="default")
    for name, strength, blocks in entries:
        link = workflow.add(
            "FastVAE_LoraStack", lora_name=name, strength=strength, blocks=blocks, **stack
        )
        stack = {"stack": link}
    node, _ = workflow.add("FastVAE_ApplyLora", model=model, mode=mode, **stack)
    workflow.add("PreviewAny", source=[node, 1])
    return workflow


def report(server, workflow):
    (shown,) = server.run(workflow).values()
    (text,) = shown["text"]
    return text


def failure(server, workflow):
    """The one line that the user reads when a node fails."""
    with pytest.raises(PromptError) as caught:
        server.run(workflow)
    kind, details = caught.value.messages[-1]
    assert kind == "execution_error"
    assert details["node_type"] == "FastVAE_ApplyLora"
    message = details["exception_message"].strip()
    assert "\n" not in message
    return message


def test_the_inputs_of_the_stack(server, lora):
    (info,) = server.get("/object_info/FastVAE_LoraStack").values()
    required, optional = info["input"]["required"], info["input"]["optional"]
    assert list(required) == ["lora_name", "strength", "blocks"]
    assert list(optional) == ["stack"]
    assert "lora.safetensors" in required["lora_name"][1]["options"]
    assert required["strength"][0] == required["blocks"][0] == "STRING"
    assert required["strength"][1]["default"] == "1.0"
    assert required["blocks"][1]["default"] == ""
    assert info["output"] == [optional["stack"][0]] == ["FASTVAE_LORA_STACK"]


def test_the_inputs_of_apply(server):
    (info,) = server.get("/object_info/FastVAE_ApplyLora").values()
    required, optional = info["input"]["required"], info["input"]["optional"]
    assert list(required) == ["model", "stack", "mode"]
    assert list(optional) == ["phase"]
    assert required["mode"][1]["options"] == ["auto", "stream", "beside", "merged"]
    assert required["mode"][1]["default"] == optional["phase"][1]["default"] == "auto"
    assert info["output"] == ["MODEL", "STRING"]


@pytest.mark.parametrize("mode", ["auto", "stream", "beside", "merged"])
def test_a_report_says_what_was_applied(server, lora, mode):
    text = report(server, apply((lora.name, "0.8", ""), (lora.name, "-0.5", "1"), mode=mode))
    assert text.startswith("lora.safetensors: 120 keys applied")
    assert text.endswith(mode)


@pytest.mark.parametrize(
    ("strength", "blocks", "said"),
    [
        ("strong", "", "'strong' is not a finite number"),
        ("1", "9-3", "9-3"),
    ],
)
def test_a_bad_text_is_refused_before_anything_runs(server, lora, strength, blocks, said):
    with pytest.raises(PromptError) as caught:
        server.run(apply((lora.name, strength, blocks)))
    ((name, errors),) = caught.value.node_errors.items()
    assert name == "2"
    assert errors["class_type"] == "FastVAE_LoraStack"
    assert said in errors["errors"][0]["details"]
    assert not caught.value.messages  # it was no prompt yet


def test_a_file_that_is_not_there_is_refused(server, lora):
    with pytest.raises(PromptError, match=r"lora_name: 'gone\.safetensors'") as caught:
        server.run(apply(("gone.safetensors", "1", "")))
    assert caught.value.node_errors


# What is said of a file, and how it is made of the model's weights.
UNUSABLE = {
    "stack: bad.safetensors is a pickle": lambda _: pickle.dumps({"a": 1}),
    "stack: bad.safetensors is not a whole safetensors file": lambda state: save(state)[:-1],
    "stack: nothing in bad.safetensors is for this model": lambda _: save(
        {f"transformer.proj.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    ),
    "bad.safetensors is for another model": lambda state: save(
        lora_for({key: torch.cat([value, value]) for key, value in state.items()})
    ),
}


@each_value_once(said=UNUSABLE, mode=["auto", "merged"])
def test_a_file_that_cannot_be_used_is_one_line_on_the_node(server, state, said, mode):
    path = server.models("loras") / "bad.safetensors"
    path.write_bytes(UNUSABLE[said](state))
    assert said in failure(server, apply((path.name, "1", ""), mode=mode))


@pytest.mark.parametrize("mode", ["auto", "merged"])
def test_a_file_that_was_replaced_is_read_anew(server, lora, state, mode):
    workflow = apply((lora.name, "1", ""), mode=mode)
    assert "lora.safetensors: 120 keys" in report(server, workflow)
    save_file(lora_for(state, parts=("pairs",)), lora)
    assert "lora.safetensors: 81 keys" in report(server, workflow)
    lora.unlink()
    with pytest.raises(PromptError):
        server.run(workflow)
