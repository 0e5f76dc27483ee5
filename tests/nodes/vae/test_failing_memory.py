"""Memory that fails in ComfyUI's nodes: the pictures of the undisturbed run, or one line."""

import itertools
import logging

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.nodes.vae.pairs import clip, fast_vae, latents, node
from fast_video_vae.tests.vae.streaming.failing_memory import ERRORS, FailingMemory

pytestmark = pytest.mark.comfyui

TASKS = {
    "decode": ("VAEDecode", latents(3, 2, 2), ()),
    "pictures": ("VAEDecode", latents(1, 2, 2, batch=2), ()),
    "tiled": ("VAEDecodeTiled", latents(3, 10, 8), (64, 0)),
    "encode": ("VAEEncode", clip(9, 16, 16), ()),
    "tiled encode": ("VAEEncodeTiled", clip(9, 80, 64), (64, 0)),
}


@pytest.fixture(autouse=True)
def _as_in_a_node(comfyui):
    """ComfyUI runs nodes in inference mode."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def vae(comfyui, tmp_path_factory):
    return fast_vae(random_state_dict(8), tmp_path_factory.mktemp("vae"))


def result(task, vae):
    name, given, options = TASKS[task]
    (got,) = node(name, vae, given if "Encode" in name else {"samples": given}, *options)
    return got["samples"] if isinstance(got, dict) else got


def is_one_line(failure):
    return "\n" not in str(failure) and str(failure).startswith("memory ran out in ")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("in_a_row", [1, 3])
def test_an_allocation_that_fails(vae, task, in_a_row):
    result(task, vae)
    expected = result(task, vae)
    with FailingMemory() as memory:
        result(task, vae)
    errors = []
    places = range(1, memory.seen + 1, max(1, memory.seen // 12))
    for place, error in zip(places, itertools.cycle(ERRORS), strict=False):
        try:
            with FailingMemory(place, in_a_row, error=error):
                got = result(task, vae)
        except torch.OutOfMemoryError as failure:
            errors.append(failure)
            continue
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max(), place
    assert not errors or in_a_row > 1
    assert all(map(is_one_line, errors))


def test_a_long_decode_says_once_that_memory_is_short(vae, caplog):
    latent = {"samples": latents(12, 2, 2)}
    (expected,) = node("VAEDecode", vae, latent)
    with FailingMemory() as memory:
        node("VAEDecode", vae, latent)
    often = FailingMemory(every=memory.seen // 24)
    with caplog.at_level(logging.INFO), often:
        (got,) = node("VAEDecode", vae, latent)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert often.failed > 12
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1
