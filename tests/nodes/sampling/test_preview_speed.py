"""Steps of Wan Sampler (Fast) with its preview take as long as without one."""

import itertools
import statistics

import pytest

from fast_video_vae.tests.nodes.sampling.test_sampler_server import Graph

pytestmark = pytest.mark.comfyui

STEPS, PAIRS = 12, 7


def seconds_of_a_step(server, method, seed):
    """The mean seconds of a step of 49 frames of 320 x 320, from the end of the first on."""
    workflow = Graph()
    workflow.known["latent_image"] = workflow.latent(320, 49)
    sampler = workflow.sampler(steps=STEPS, seed=seed)
    workflow.add("SaveLatent", samples=sampler, filename_prefix="speed")
    prompt_id = server.queue(workflow, preview_method=method)
    server.wait(prompt_id)
    first, *_, last = server.events.all("progress", prompt_id=prompt_id, node=sampler[0])
    assert last.data["value"] == STEPS
    seconds = (last.time_s - first.time_s) / (last.data["value"] - first.data["value"])
    # ComfyUI sends a message of progress without a preview at most every 0.1 s, so the time of a
    # message is that of its step only in steps that take clearly longer.
    assert seconds >= 0.25
    return seconds


@pytest.mark.slow
@pytest.mark.alone
def test_the_preview_adds_almost_nothing_to_a_step(expert_server):
    """Pairs take turns in their order, so that a machine that slows down favors neither."""
    server = expert_server
    assert server.events  # the first access connects, before a message is sent
    seconds_of_a_step(server, "none", 0)  # loads the models
    seeds, ratios = itertools.count(1), []
    for pair in range(PAIRS):
        methods = ["none", "auto"] if pair % 2 else ["auto", "none"]
        seconds = {method: seconds_of_a_step(server, method, next(seeds)) for method in methods}
        ratios.append(seconds["auto"] / seconds["none"])
    assert statistics.median(ratios) <= 1.05, ratios
