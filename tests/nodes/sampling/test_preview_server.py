"""The preview of Wan Sampler (Fast) over the websocket of a running ComfyUI."""

import hashlib
import io
import re

import pytest

from fast_video_vae.tests.nodes.sampling.test_sampler_server import Graph

pytestmark = pytest.mark.comfyui

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
    assert [each.data["value"] for each in bars] == list(range(1, steps_of_seconds + 1))
    # The thread adds four pictures per second to those of the steps.
    assert len(sent) > len(bars) + 4
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
