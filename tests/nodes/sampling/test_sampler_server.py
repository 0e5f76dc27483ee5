"""Wan Sampler (Fast) in a running ComfyUI: files, progress, stops and errors, over HTTP."""

import re

import pytest
import torch
from safetensors.torch import load_file

from fast_video_vae.tests.nodes.sampling.sampler_models import DEFAULTS
from fast_video_vae.tests.nodes.server import PromptError, Workflow

pytestmark = pytest.mark.comfyui


class Graph(Workflow):
    """A workflow with both experts and what to show."""

    def __init__(self):
        super().__init__()
        self.known = {"latent_image": self.latent(64, 9)}
        for seed, name in enumerate(("model_high", "model_low")):
            file = f"expert-{seed}.safetensors"
            self.known[name] = self.add("UNETLoader", unet_name=file, weight_dtype="default")
        text = self.add("Test_Value", name="conditioning")
        self.known |= {"positive": text, "negative": text}

    def sampler(self, **given):
        return self.add("FastVAE_WanSampler", **(DEFAULTS | self.known | given))

    def lora(self, seed, strength):
        return self.add(
            "FastVAE_LoraStack", lora_name=f"lora-{seed}.safetensors", strength=strength, blocks=""
        )


def latents(server, shown, node):
    (file,) = server.files(shown[node[0]])
    return load_file(file)["latent_tensor"]


def test_one_progress_bar_covers_all_steps_and_names_the_expert(expert_server):
    graph = Graph()
    loras = {"loras_high": graph.lora(0, "0.8"), "loras_low": graph.lora(1, "0.6")}
    sampler = graph.sampler(seed=8, steps=6, **loras)
    latent = graph.add("SaveLatent", samples=sampler, filename_prefix="bar")
    report = graph.add("PreviewAny", source=[sampler[0], 3])
    events = expert_server.events
    prompt_id = expert_server.queue(graph)
    shown = expert_server.wait(prompt_id)
    assert latents(expert_server, shown, latent).shape == (1, 16, 3, 8, 8)
    (text,) = shown[report[0]]["text"]
    assert "high noise: steps 1-3" in text
    assert "lora-0.safetensors" in text
    bars = [event.data for event in events.all("progress", prompt_id=prompt_id)]
    bars = [data for data in bars if data["node"] == sampler[0]]
    assert {data["max"] for data in bars} == {6}
    assert [data["value"] for data in bars] == sorted(data["value"] for data in bars)
    assert bars[-1]["value"] == 6
    texts = [event.data["text"] for event in events.all("text", node=sampler[0])]
    # At shift 5 three of six levels are at 0.875 or above.
    assert texts[-8:] == [
        "high noise", "high noise: step 1 of 6", "high noise: step 2 of 6",
        "high noise: step 3 of 6",
        "low noise", "low noise: step 4 of 6", "low noise: step 5 of 6", "low noise: step 6 of 6",
    ]  # fmt: skip


def test_a_stopped_run_ends_at_once_and_the_next_run_succeeds(expert_server):
    def graph(steps):
        graph = Graph()
        given = {"latent_image": graph.latent(256, 33), "loras_high": graph.lora(0, "1")}
        sampler = graph.sampler(steps=steps, seed=steps, **given)
        return graph, graph.add("SaveLatent", samples=sampler, filename_prefix="stopped")

    workflow, saved = graph(2)
    expected = latents(expert_server, expert_server.run(workflow), saved)
    error, seconds = expert_server.interrupted(graph(1000)[0])
    assert error.interrupted
    assert seconds < 3
    workflow, saved = graph(2)
    workflow[saved[0]]["inputs"]["filename_prefix"] = "after"  # the sampler's result was kept
    workflow.add("SaveLatent", samples=workflow.sampler(seed=3), filename_prefix="other")
    assert torch.equal(latents(expert_server, expert_server.run(workflow), saved), expected)


TEXTS = ("shift_high", "shift_low", "cfg_high", "cfg_low", "boundary")


def refused(server, graph, node):
    """Return the errors of a node by input, of a prompt that the server refuses."""
    graph.add("SaveLatent", samples=graph.sampler(**graph.known), filename_prefix="refused")
    with pytest.raises(PromptError) as caught:
        server.run(graph)
    assert not caught.value.messages  # it did not run
    (found,) = caught.value.node_errors.values()
    assert found["class_type"] == node
    errors = {error["extra_info"]["input_name"]: error["details"] for error in found["errors"]}
    assert len(errors) == len(found["errors"])
    assert not any("\n" in details for details in errors.values())
    return errors


@pytest.mark.parametrize(
    ("given", "said", "only"),
    [
        ({"boundary": "1.5"}, "boundary: got '1.5'; expected 'auto'", "boundary is"),
        ({"shift_low": "-1"}, "shift_low: got -1; expected a shift above 0", "shift_low is"),
        (
            {"boundary": "early", "cfg_high": "one"},
            "cfg_high: got 'one'; expected a number, numbers with commas, or 'auto'; "
            "boundary: got 'early'; expected",
            "cfg_high and boundary are",
        ),
    ],
)
def test_a_refused_text_names_the_wrong_inputs_only(expert_server, given, said, only):
    """ComfyUI repeats the error for each text, so each says which texts are wrong."""
    graph = Graph()
    graph.known |= given
    errors = refused(expert_server, graph, "FastVAE_WanSampler")
    assert set(errors) == set(TEXTS)
    for name, details in errors.items():
        assert details.startswith(f"{name} - {said}")
        assert details.endswith(f" (only {only} wrong)")


@pytest.mark.parametrize(
    ("strength", "blocks", "said"),
    [
        ("strong", "", r"strength 'strong'.* \(only strength is wrong\)"),
        ("1", "9-3", r"blocks '9-3'.* \(only blocks is wrong\)"),
        ("strong", "9-3", r"strength 'strong': .*; blocks '9-3': [^(]*"),
    ],
)
def test_a_refused_text_of_a_lora_names_the_wrong_input_only(expert_server, strength, blocks, said):
    graph = Graph()
    graph.known["loras_high"] = lora = graph.lora(0, strength)
    graph[lora[0]]["inputs"]["blocks"] = blocks
    for name, details in refused(expert_server, graph, "FastVAE_LoraStack").items():
        assert re.fullmatch(f"{name} - {said}", details)
