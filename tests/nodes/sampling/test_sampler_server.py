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


THREAD_NAME = "fast-vae-preview"

LATENT_FRAMES = 4


def graph(steps, *, side=128, seed=1):
    workflow = Graph()
    workflow.known["latent_image"] = workflow.latent(side, 4 * LATENT_FRAMES - 3)
    sampler = workflow.sampler(steps=steps, seed=seed)
    workflow.add("SaveLatent", samples=sampler, filename_prefix="preview")
    return workflow, sampler[0]


def pictures(events, prompt_id):
    """The previews between the start and the end of a prompt."""
    start = events.wait("execution_start", 30, prompt_id=prompt_id).time_s
    end = events.wait("executing", 30, prompt_id=prompt_id, node=None).time_s
    return [each for each in events.all("preview") if start <= each.time_s <= end]


def names_of_threads(server, run):
    workflow = Graph()
    shown = workflow.add("PreviewAny", source=workflow.add("Test_Threads", run=run))
    return server.run(workflow)[shown[0]]["text"][0]


@pytest.fixture(scope="module")
def steps_of_seconds(expert_server):
    """Steps of a run of about 4 s, in which the clip plays four times."""
    workflow, node = graph(20, seed=99)
    events = expert_server.events
    prompt_id = expert_server.queue(workflow)
    expert_server.wait(prompt_id)
    bars = events.all("progress", prompt_id=prompt_id, node=node)
    return min(1000, round(4 * 19 / (bars[-1].time_s - bars[0].time_s)) + 2)


def test_the_whole_clip_plays_while_a_run_computes(expert_server, steps_of_seconds):
    from PIL import Image

    events = expert_server.events
    workflow, node = graph(steps_of_seconds)
    prompt_id = expert_server.queue(workflow, preview_method="auto")
    expert_server.wait(prompt_id)
    sent = pictures(events, prompt_id)
    different = {hashlib.sha256(each.data["image"]).digest() for each in sent}
    assert len(different) >= LATENT_FRAMES
    opened = [Image.open(io.BytesIO(each.data["image"])) for each in sent]
    assert {each.format for each in opened} == {"JPEG"}
    # ComfyUI enlarges a picture to its --preview-size.
    assert {each.size for each in opened} == {(512, 512)}
    bars = events.all("progress", prompt_id=prompt_id, node=node)
    assert {each.data["value"] for each in bars} == {*range(1, steps_of_seconds + 1)}
    # The thread adds four pictures per second to those of the steps.
    assert len(sent) > steps_of_seconds + 4
    assert THREAD_NAME not in names_of_threads(expert_server, 1)


def test_a_client_that_supports_it_gets_the_node_of_a_preview(expert_server):
    client = "with-metadata"
    events = expert_server.listen(client, supports_preview_metadata=True)
    events.wait("feature_flags", 10)
    workflow, node = graph(30, seed=2)
    prompt_id = expert_server.queue(workflow, client, preview_method="latent2rgb")
    expert_server.wait(prompt_id)
    sent = pictures(events, prompt_id)
    assert sent
    for each in sent:
        assert each.data["node_id"] == each.data["display_node_id"] == node
        assert each.data["prompt_id"] == prompt_id
        assert each.data["image_type"] == "image/jpeg"


def test_no_preview_is_sent_with_previews_off(expert_server):
    events = expert_server.events
    for method in ("none", "default"):  # the server was started without --preview-method
        prompt_id = expert_server.queue(graph(8, seed=len(method))[0], preview_method=method)
        expert_server.wait(prompt_id)
        assert pictures(events, prompt_id) == []


def test_the_thread_ends_with_an_interrupt(expert_server):
    error, seconds = expert_server.interrupted(graph(1000, side=256)[0], preview_method="auto")
    assert error.interrupted
    assert seconds < 3
    assert re.search(r"\bMainThread\b", names := names_of_threads(expert_server, 2))
    assert THREAD_NAME not in names
    count = len(expert_server.events.all("preview"))
    names_of_threads(expert_server, 3)
    assert len(expert_server.events.all("preview")) == count
