"""Memory that fails in ComfyUI's nodes: the pictures of the undisturbed run, or one line."""

import itertools
import logging

import pytest
import torch

from fast_video_vae.tests.nodes.vae.pairs import clip, latents, node
from fast_video_vae.tests.vae.streaming.failing_memory import ERRORS, FailingMemory

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

TASKS = {
    "decode": ("VAEDecode", latents(3, 2, 2), ()),
    "pictures": ("VAEDecode", latents(1, 2, 2, batch=2), ()),
    "tiled": ("VAEDecodeTiled", latents(3, 10, 8), (64, 0)),
    "encode": ("VAEEncode", clip(9, 16, 16), ()),
    "tiled encode": ("VAEEncodeTiled", clip(9, 80, 64), (64, 0)),
}


def result(task, vae):
    name, given, options = TASKS[task]
    (got,) = node(name, vae, given if "Encode" in name else {"samples": given}, *options)
    return got["samples"] if isinstance(got, dict) else got


def is_one_line(failure):
    return "\n" not in str(failure) and str(failure).startswith("memory ran out in ")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("in_a_row", [1, 3])
def test_an_allocation_that_fails(fast, task, in_a_row):
    result(task, fast)
    expected = result(task, fast)
    with FailingMemory() as memory:
        result(task, fast)
    errors = []
    places = range(1, memory.seen + 1, max(1, memory.seen // 8))
    for place, error in zip(places, itertools.cycle(ERRORS), strict=False):
        try:
            with FailingMemory(place, in_a_row, error=error):
                got = result(task, fast)
        except torch.OutOfMemoryError as failure:
            errors.append(failure)
            continue
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max(), place
    assert not errors or in_a_row > 1
    assert all(map(is_one_line, errors))


def test_a_long_decode_says_once_that_memory_is_short(fast, caplog):
    latent = {"samples": latents(12, 2, 2)}
    (expected,) = node("VAEDecode", fast, latent)
    with FailingMemory() as memory:
        node("VAEDecode", fast, latent)
    often = FailingMemory(every=memory.seen // 24)
    with caplog.at_level(logging.INFO), often:
        (got,) = node("VAEDecode", fast, latent)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert often.failed > 12
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1
