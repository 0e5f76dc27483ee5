"""Wan Sampler (Fast) in a running ComfyUI: progress, previews, stops and errors, over HTTP."""

import hashlib
import io
import re

import pytest
import torch
from safetensors.torch import load_file

from fast_video_vae.tests.nodes.prompts import Prompt
from fast_video_vae.tests.nodes.sampling.sampler_models import DEFAULTS
from fast_video_vae.tests.nodes.server import Workflow

pytestmark = pytest.mark.comfyui

LATENT_FRAMES = 4
FEATURES = {"supports_preview_metadata": True}


class Graph(Prompt):
    """A workflow with both experts, and a latent of `side` pixels to sample from."""

    def __init__(self, side=64):
        super().__init__()
        text = self.add("Test_Value", name="conditioning")
        self.known = {"model_high": self.expert(0), "model_low": self.expert(1)}
        self.known |= {"latent_image": self.latent(side, 4 * LATENT_FRAMES - 3)}
        self.known |= {"positive": text, "negative": text}

    def sampler(self, **given):
        return self.add("FastVAE_WanSampler", **(DEFAULTS | self.known | given))

    def saved(self, **given):
        """Add a sampler and a node that saves the latent; return their ids."""
        (sampler, _) = self.sampler(**given)
        return sampler, self.add("SaveLatent", samples=[sampler, 0], filename_prefix="x")[0]


def test_one_progress_bar_covers_all_steps_and_names_the_expert(expert_server):
    workflow, events = Graph(), expert_server.events
    loras = {"loras_high": workflow.loras(0, "0.8"), "loras_low": workflow.loras(1, "0.6")}
    sampler = workflow.sampler(seed=8, steps=6, **loras)
    shown = [workflow.add("PreviewAny", source=[sampler[0], output]) for output in (3, 4)]
    prompt_id = expert_server.queue(workflow)
    done = expert_server.wait(prompt_id)
    report, times = (done[node]["text"][0] for node, _ in shown)
    assert "lora-0.safetensors" in report
    assert all(part in times for part in ("denoise", "high noise", "low noise", "switch", "load"))
    bars = [each.data for each in events.all("progress", prompt_id=prompt_id, node=sampler[0])]
    assert {data["max"] for data in bars} == {6}
    assert [data["value"] for data in bars] == sorted(data["value"] for data in bars)
    assert bars[-1]["value"] == 6
    texts = [event.data["text"] for event in events.all("text", node=sampler[0])]
    # At shift 5 three of six levels are at 0.875 or above.
    high = ["high noise", *(f"high noise: step {step} of 6" for step in (1, 2, 3))]
    assert texts[-8:] == [*high, "low noise", *(f"low noise: step {n} of 6" for n in (4, 5, 6))]


def test_a_stopped_run_and_its_preview_end_at_once_and_the_next_run_succeeds(expert_server):
    def result():
        workflow = Graph()
        _, saved = workflow.saved(steps=2, seed=5)
        (file,) = expert_server.files(expert_server.run(workflow)[saved])
        return load_file(file)["latent_tensor"]

    expected, workflow = result(), Graph(256)
    workflow.saved(steps=1000)
    error, seconds = expert_server.interrupted(workflow, preview_method="auto")
    assert error.interrupted
    assert seconds < 3
    threads = Workflow()
    shown, _ = threads.add("PreviewAny", source=threads.add("Test_Threads"))
    (names,) = expert_server.run(threads)[shown]["text"]
    assert re.search(r"\bMainThread\b", names)
    assert "fast-vae-preview" not in names
    assert torch.equal(result(), expected)


def test_the_whole_clip_plays_while_a_run_computes(expert_server):
    """For a client that supports it, with the node of a preview."""
    from PIL import Image

    client, events = "with-metadata", expert_server.listen("with-metadata", **FEATURES)
    events.wait("feature_flags", 10)
    workflow = Graph(128)
    node, _ = workflow.saved(steps=30)
    prompt_id = expert_server.queue(workflow, client, preview_method="auto")
    expert_server.wait(prompt_id)
    events.wait("executing", 30, prompt_id=prompt_id, node=None)
    sent = events.all("preview", prompt_id=prompt_id, node_id=node, image_type="image/jpeg")
    assert sent == events.all("preview")
    assert len({hashlib.sha256(each.data["image"]).digest() for each in sent}) >= LATENT_FRAMES
    opened = [Image.open(io.BytesIO(each.data["image"])) for each in sent]
    # ComfyUI enlarges a picture to its --preview-size.
    assert {(each.format, each.size) for each in opened} == {("JPEG", (512, 512))}
