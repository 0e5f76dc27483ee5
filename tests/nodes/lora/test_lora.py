"""The LoRA nodes in a running ComfyUI, over HTTP: their inputs, errors, and files that change."""

import os

import pytest
import torch
from safetensors.torch import save_file

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
    assert all(each[1]["tooltip"] for each in (*required.values(), *optional.values()))


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
        ("0.9,,0.8", "", "'' is not a finite number"),
        ("nan", "", "'nan' is not a finite number"),
        ("1;0;1;0", "", "has 4 phases"),
        ("1@0.7-0.3", "", "'0.7-0.3' is no window"),
        ("1", "9-3", "9-3"),
        ("1", "self_attn=much", "self_attn=much"),
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


def test_a_lora_of_another_model_shows_names_of_both(server, state):
    name = "other.safetensors"
    tensors = {
        f"transformer.single_blocks.{number}.proj.lora_{part}.weight": torch.ones(4, 4)
        for number in range(9)
        for part in "AB"
    }
    save_file(tensors, server.models("loras") / name)
    message = failure(server, apply((name, "1", "")))
    assert f"stack: nothing in {name} is for this model" in message
    theirs, ours = message.split("the model has")
    assert theirs.count("transformer.single_blocks.") == 5
    assert ours.count("diffusion_model.") == 5


def test_a_lora_of_a_larger_model_says_what_does_not_fit(server, lora, state):
    larger = lora_for({key: torch.cat([value, value]) for key, value in state.items()})
    save_file(larger, server.models("loras") / "larger.safetensors")
    message = failure(server, apply(("larger.safetensors", "1", "")))
    assert "larger.safetensors is for another model" in message
    assert "256" in message
    assert "128" in message


@pytest.mark.parametrize("mode", ["auto", "merged"])
def test_a_pickle_is_refused(server, state, mode, tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    path = server.models("loras") / "pickle.safetensors"
    torch.save({"diffusion_model.blocks.0.self_attn.q.diff_b": Harmful()}, path)
    message = failure(server, apply((path.name, "1", ""), mode=mode))
    assert "stack: pickle.safetensors is a pickle" in message
    assert not (tmp_path / "harm").exists()


@each_value_once(kept=[0, 5, 0.1, 0.9], mode=["auto", "merged"])
def test_a_file_that_was_cut_off_is_refused(server, lora, mode, kept):
    whole = lora.read_bytes()
    path = server.models("loras") / f"cut-{kept}.safetensors"
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    message = failure(server, apply((path.name, "1", ""), mode=mode))
    assert f"stack: {path.name} is not a whole safetensors file" in message


@pytest.mark.parametrize("mode", ["auto", "merged"])
def test_a_file_that_was_replaced_is_read_anew(server, lora, state, mode):
    workflow = apply((lora.name, "1", ""), mode=mode)
    assert "lora.safetensors: 120 keys" in report(server, workflow)
    save_file(lora_for(state, parts=("pairs",)), lora)
    assert "lora.safetensors: 81 keys" in report(server, workflow)
    lora.unlink()
    with pytest.raises(PromptError):
        server.run(workflow)
