"""Nodes of other packs that compile a VAE have no effect on the fast VAE and do not fail."""

import copy

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.nodes.vae.pairs import clip, fast_vae, latents, node

pytestmark = pytest.mark.comfyui


@pytest.fixture
def compiled():
    """Graphs that `torch.compile` was given, and its wrapper."""
    import torch._dynamo

    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    yield graphs, lambda target: torch.compile(target, backend=backend)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Dynamo")  # warnings about surrounding code
@pytest.mark.parametrize("what", ["decode", "encode", "decoder", "encoder", "itself"])
def test_compilation_does_not_change_the_vae(comfyui, tmp_path, compiled, what):
    graphs, wrap = compiled
    plain = fast_vae(random_state_dict(8), tmp_path)
    vae = copy.copy(plain)
    vae.first_stage_model = first = copy.deepcopy(plain.first_stage_model)
    if what == "itself":
        vae.first_stage_model = wrap(first)
    else:
        setattr(first, what, wrap(getattr(first, what)))
    with torch.inference_mode():
        for frames in (5, 9):
            samples = {"samples": latents(frames)}
            expected = node("VAEDecode", vae=plain, samples=samples)[0]
            assert torch.equal(node("VAEDecode", vae=vae, samples=samples)[0], expected)
            pixels = clip(frames, 64, 64)
            expected = node("VAEEncode", vae=plain, pixels=pixels)[0]["samples"]
            actual = node("VAEEncode", vae=vae, pixels=pixels)[0]["samples"]
            assert torch.equal(actual, expected)
    calls = ("call_function", "call_method", "call_module")
    assert not [node for graph in graphs for node in graph.graph.nodes if node.op in calls]
