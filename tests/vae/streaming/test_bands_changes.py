"""Bands that change in a running video: in every mode of the caller, and when memory runs out."""

import contextlib
import itertools

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import joined, latent_for, random_frames
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.streaming.bands import balance

LATENTS, HEIGHT, WIDTH = 7, 16, 96


@pytest.fixture
def vae():
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    vae.devices = ["cpu"] * 3
    return vae


@pytest.fixture
def cuts(monkeypatch):
    """Cut other bands after the second and the fourth chunk; the spans of all chunks."""
    spans, turns = [], itertools.cycle([{0: 1, 1: 3, 2: 2}, {0: 2, 1: 1, 2: 1}])

    def noted(self, plans, bands, seconds):
        spans.append(tuple(bands.spans.values()))
        return plans.recut(bands, next(turns)) if len(spans) in (2, 4) else None

    monkeypatch.setattr(balance.Balance, "note", noted)
    return spans


def run(vae, task):
    if task == "decode":
        return joined(vae.decode_stream(latent_for(vae, LATENTS, HEIGHT, WIDTH), StreamOptions(1)))
    video = random_frames(1, 3, 4 * LATENTS - 3, HEIGHT, WIDTH)
    return joined(vae.encode_stream(video, StreamOptions(1)))


def alone(vae, task):
    """The result of one device."""
    devices, vae.devices = vae.devices, []
    result = run(vae, task)
    vae.devices = devices
    return result


MODES = {
    "grad": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,  # as ComfyUI calls
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", ["decode", "encode"])
def test_bands_are_cut_again_in_every_mode(vae, cuts, task, mode):
    expected = alone(vae, task)
    with MODES[mode]():
        assert torch.equal(run(vae, task), expected)
    assert len(set(cuts)) == 3
