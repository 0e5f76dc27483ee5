"""Wan Sampler (Fast) in a running ComfyUI: files, progress, stops and errors, over HTTP."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from fast_video_vae.tests.nodes.lora.lora_models import lora_for, random_weights
from fast_video_vae.tests.nodes.sampling.sampler_models import DEFAULTS
from fast_video_vae.tests.nodes.server import PromptError, Workflow

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def files(server, comfyui):
    """Two experts and a LoRA for each, where the server's loaders find them."""
    for seed in (0, 1):
        state = random_weights("wan21-t2v", seed)
        save_file(state, server.models("diffusion_models") / f"expert-{seed}.safetensors")
        lora = {key: value.contiguous() for key, value in lora_for(state, seed=seed).items()}
        save_file(lora, server.models("loras") / f"lora-{seed}.safetensors")
    return server


class Graph(Workflow):
    """A workflow with both experts and what to show."""

    def __init__(self):
        super().__init__()
        self.known = {"latent_image": self.empty(64, 9)}
        for seed, name in enumerate(("model_high", "model_low")):
            file = f"expert-{seed}.safetensors"
            self.known[name] = self.add("UNETLoader", unet_name=file, weight_dtype="default")
        for seed, name in enumerate(("positive", "negative"), start=1):
            self.known[name] = self.add("Test_Conditioning", size=4096, seed=seed)

    def empty(self, side, length):
        size = {"width": side, "height": side, "length": length, "batch_size": 1}
        return self.add("EmptyHunyuanLatentVideo", **size)

    def sampler(self, **given):
        return self.add("FastVAE_WanSampler", **(DEFAULTS | self.known | given))

    def lora(self, seed, strength):
        return self.add(
            "FastVAE_LoraStack", lora_name=f"lora-{seed}.safetensors", strength=strength, blocks=""
        )


def latents(server, shown, node):
    (file,) = server.files(shown[node[0]])
    return load_file(file)["latent_tensor"]


def test_experts_with_loras_run_and_report(files):
    graph = Graph()
    ours = graph.sampler(loras_high=graph.lora(0, "0.8"), loras_low=graph.lora(1, "0.6"))
    latent = graph.add("SaveLatent", samples=ours, filename_prefix="ours")
    report = graph.add("PreviewAny", source=[ours[0], 3])
    shown = files.run(graph)
    assert latents(files, shown, latent).shape == (1, 16, 3, 8, 8)
    (text,) = shown[report[0]]["text"]
    assert "high noise: steps 1-2" in text
    assert "lora-0.safetensors" in text


def test_one_bar_goes_over_all_steps_with_the_expert_in_its_text(files):
    graph = Graph()
    sampler = graph.sampler(seed=8, steps=6)
    graph.add("SaveLatent", samples=sampler, filename_prefix="bar")
    events = files.events
    prompt_id = files.queue(graph)
    files.wait(prompt_id)
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


def test_a_stopped_run_ends_at_once_and_the_next_is_whole(files):
    def graph(steps):
        graph = Graph()
        given = {"latent_image": graph.empty(256, 33), "loras_high": graph.lora(0, "1")}
        sampler = graph.sampler(steps=steps, seed=steps, **given)
        return graph, graph.add("SaveLatent", samples=sampler, filename_prefix="stopped")

    workflow, saved = graph(2)
    expected = latents(files, files.run(workflow), saved)
    error, seconds = files.interrupted(graph(1000)[0])
    assert error.interrupted
    assert seconds < 3
    workflow, saved = graph(2)
    workflow[saved[0]]["inputs"]["filename_prefix"] = "after"  # the sampler's result was kept
    workflow.add("SaveLatent", samples=workflow.sampler(seed=3), filename_prefix="other")
    assert torch.equal(latents(files, files.run(workflow), saved), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"boundary": "2.0"}, "boundary: '2.0' is not"),
        ({"cfg_high": "one"}, "cfg_high: 'one' is not a number"),
        ({"shift_low": "-1"}, "shift_low: -1 is no shift"),
    ],
)
def test_a_text_that_means_nothing_is_refused_before_the_prompt_runs(files, given, message):
    graph = Graph()
    sampler = graph.sampler(**given)
    graph.add("SaveLatent", samples=sampler, filename_prefix="refused")
    with pytest.raises(PromptError) as refused:
        files.run(graph)
    # ComfyUI says it once for each input that a node looks at.
    for error in refused.value.node_errors[sampler[0]]["errors"]:
        assert message in error["details"]


def test_a_list_of_another_length_is_one_line_on_the_node(files):
    graph = Graph()
    sampler = graph.sampler(cfg_low="1,2,3", seed=9)
    graph.add("SaveLatent", samples=sampler, filename_prefix="refused")
    with pytest.raises(PromptError) as failed:
        files.run(graph)
    _, details = failed.value.messages[-1]
    assert details["node_id"] == sampler[0]
    assert details["exception_message"].strip() == (
        "cfg_low: 3 values; expected 1, 2 for its steps or 4 for all steps"
    )
