"""Steps of Wan Sampler (Fast) with its preview take as long as without one."""

import itertools
import statistics

import pytest

from fast_video_vae.tests.nodes.sampling.test_sampler_server import Graph

pytestmark = pytest.mark.comfyui

STEPS, ROUNDS = 12, 3


def seconds_of_a_step(server, method, seed):
    """The median seconds of a step of 33 frames of 256 x 256."""
    workflow = Graph()
    workflow.known["latent_image"] = workflow.latent(256, 33)
    sampler = workflow.sampler(steps=STEPS, seed=seed)
    workflow.add("SaveLatent", samples=sampler, filename_prefix="speed")
    prompt_id = server.queue(workflow, preview_method=method)
    server.wait(prompt_id)
    bars = server.events.all("progress", prompt_id=prompt_id, node=sampler[0])
    times = [each.time_s for each in bars if each.data["value"] > 0]
    return statistics.median(end - start for start, end in itertools.pairwise(times))


@pytest.mark.slow
@pytest.mark.alone
def test_the_preview_adds_almost_nothing_to_a_step(expert_server):
    """The best pair counts, because other processes slow steps down more than a preview."""
    server = expert_server
    assert server.events
    seconds_of_a_step(server, "none", 0)  # loads the models
    ratios = []
    for seed in range(1, ROUNDS + 1):
        without = seconds_of_a_step(server, "none", 2 * seed)
        ratios.append(seconds_of_a_step(server, "auto", 2 * seed + 1) / without)
    assert min(ratios) <= 1.05, ratios
