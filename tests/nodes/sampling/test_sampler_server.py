"""Wan Sampler (Fast) in a running ComfyUI: progress, previews, stops and errors, over HTTP."""

import hashlib
import io
import re

import pytest
import torch
from safetensors.torch import load_file

from fast_video_vae.tests.nodes.sampling.sampler_models import DEFAULTS
from fast_video_vae.tests.nodes.server import PromptError, Workflow

pytestmark = pytest.mark.comfyui

THREAD_NAME = "fast-vae-preview"
LATENT_FRAMES = 4


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

    def lora(self, seed, strength, blocks=""):
        given = {"lora_name": f"lora-{seed}.safetensors", "strength": strength, "blocks": blocks}
        return self.add("FastVAE_LoraStack", **given)


def graph(steps, *, side=128, seed=1):
    """A workflow of a sampler, its node, and the node that saves the latent."""
    workflow = Graph()
    latent = workflow.latent(side, 4 * LATENT_FRAMES - 3)
    sampler = workflow.sampler(steps=steps, seed=seed, latent_image=latent)
    saved = workflow.add("SaveLatent", samples=sampler, filename_prefix=f"seed{seed}")
    return workflow, sampler[0], saved[0]


def latents(server, shown, node):
    (file,) = server.files(shown[node])
    return load_file(file)["latent_tensor"]


def pictures(events, prompt_id):
    """The previews between the start and the end of a prompt."""
    start = events.wait("execution_start", 30, prompt_id=prompt_id).time_s
    end = events.wait("executing", 30, prompt_id=prompt_id, node=None).time_s
    return [each for each in events.all("preview") if start <= each.time_s <= end]


def names_of_threads(server, run):
    workflow = Graph()
    shown = workflow.add("PreviewAny", source=workflow.add("Test_Threads", run=run))
    return server.run(workflow)[shown[0]]["text"][0]


def test_one_progress_bar_covers_all_steps_and_names_the_expert(expert_server):
    workflow, events = Graph(), expert_server.events
    loras = {"loras_high": workflow.lora(0, "0.8"), "loras_low": workflow.lora(1, "0.6")}
    sampler = workflow.sampler(seed=8, steps=6, **loras)
    report = workflow.add("PreviewAny", source=[sampler[0], 3])
    prompt_id = expert_server.queue(workflow)
    (text,) = expert_server.wait(prompt_id)[report[0]]["text"]
    assert "high noise: steps 1-3" in text
    assert "lora-0.safetensors" in text
    bars = [each.data for each in events.all("progress", prompt_id=prompt_id, node=sampler[0])]
    assert {data["max"] for data in bars} == {6}
    assert [data["value"] for data in bars] == sorted(data["value"] for data in bars)
    assert bars[-1]["value"] == 6
    texts = [event.data["text"] for event in events.all("text", node=sampler[0])]
    # At shift 5 three of six levels are at 0.875 or above.
    high = ["high noise", *(f"high noise: step {step} of 6" for step in (1, 2, 3))]
    assert texts[-8:] == [*high, "low noise", *(f"low noise: step {n} of 6" for n in (4, 5, 6))]


def test_a_stopped_run_and_its_preview_end_at_once_and_the_next_run_succeeds(expert_server):
    workflow, _, saved = graph(2, seed=5)
    expected = latents(expert_server, expert_server.run(workflow), saved)
    error, seconds = expert_server.interrupted(graph(1000, side=256)[0], preview_method="auto")
    assert error.interrupted
    assert seconds < 3
    assert re.search(r"\bMainThread\b", names := names_of_threads(expert_server, 2))
    assert THREAD_NAME not in names
    count = len(expert_server.events.all("preview"))
    names_of_threads(expert_server, 3)
    assert len(expert_server.events.all("preview")) == count
    other = workflow.sampler(steps=2, seed=6)  # so that ComfyUI keeps no result
    workflow.add("SaveLatent", samples=other, filename_prefix="other")
    workflow[saved]["inputs"]["filename_prefix"] = "after"
    assert torch.equal(latents(expert_server, expert_server.run(workflow), saved), expected)


def refused(server, workflow, node):
    """Return the errors of a node by input, of a prompt that the server refuses."""
    workflow.add("SaveLatent", samples=workflow.sampler(), filename_prefix="refused")
    with pytest.raises(PromptError) as caught:
        server.run(workflow)
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
    workflow = Graph()
    workflow.known |= given
    errors = refused(expert_server, workflow, "FastVAE_WanSampler")
    assert set(errors) == {"shift_high", "shift_low", "cfg_high", "cfg_low", "boundary"}
    for name, details in errors.items():
        assert details.startswith(f"{name} - {said}")
        assert details.endswith(f" (only {only} wrong)")


@pytest.mark.parametrize(
    ("strength", "blocks", "said"),
    [
        ("1", "9-3", r"blocks '9-3'.* \(only blocks is wrong\)"),
        ("strong", "9-3", r"strength 'strong': .*; blocks '9-3': [^(]*"),
    ],
)
def test_a_refused_text_of_a_lora_names_the_wrong_input_only(expert_server, strength, blocks, said):
    workflow = Graph()
    workflow.known["loras_high"] = workflow.lora(0, strength, blocks)
    for name, details in refused(expert_server, workflow, "FastVAE_LoraStack").items():
        assert re.fullmatch(f"{name} - {said}", details)


def test_the_whole_clip_plays_while_a_run_computes(expert_server):
    """For a client that supports it, with the node of a preview."""
    from PIL import Image

    client, events = "with-metadata", expert_server.events
    bars = []
    for steps, seed in ((20, 99), (None, 1)):
        if steps is None:  # a run of about 4 s, in which the clip plays four times
            steps = min(1000, round(4 * 19 / (bars[-1].time_s - bars[0].time_s)) + 2)
            events = expert_server.listen(client, supports_preview_metadata=True)
            events.wait("feature_flags", 10)
        workflow, node, _ = graph(steps, seed=seed)
        to = () if events is expert_server.events else (client,)
        prompt_id = expert_server.queue(workflow, *to, preview_method="auto")
        expert_server.wait(prompt_id)
        bars = events.all("progress", prompt_id=prompt_id, node=node)
    sent = pictures(events, prompt_id)
    assert len({hashlib.sha256(each.data["image"]).digest() for each in sent}) >= LATENT_FRAMES
    opened = [Image.open(io.BytesIO(each.data["image"])) for each in sent]
    # ComfyUI enlarges a picture to its --preview-size.
    assert {(each.format, each.size) for each in opened} == {("JPEG", (512, 512))}
    assert {each.data["value"] for each in bars} == {*range(1, steps + 1)}
    # The thread adds four pictures per second to those of the steps.
    assert len(sent) > steps + 4
    for each in sent:
        assert each.data["node_id"] == each.data["display_node_id"] == node
        assert each.data["prompt_id"] == prompt_id
        assert each.data["image_type"] == "image/jpeg"
    assert THREAD_NAME not in names_of_threads(expert_server, 1)


def test_no_preview_is_sent_with_previews_off(expert_server):
    events = expert_server.events
    for method in ("none", "default"):  # the server was started without --preview-method
        prompt_id = expert_server.queue(graph(8, seed=len(method))[0], preview_method=method)
        expert_server.wait(prompt_id)
        assert pictures(events, prompt_id) == []
