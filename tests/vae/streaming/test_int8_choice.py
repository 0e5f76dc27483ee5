"""What int8 costs: at most 1.5 dB next to bfloat16, with weights of any distribution."""

import math

import pytest
import torch

from fast_video_vae.tests.benchmarks.weights import random_weights
from fast_video_vae.tests.vae.families import STATES, computes_16_bits, latent_for, prepared
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.streaming.int8 import layers

MOST_DB = 1.5

pytestmark = pytest.mark.usefixtures("int8")


@pytest.fixture(autouse=True)
def computes_bfloat16(monkeypatch):
    """Also on a CPU that is slow in it."""
    computes_16_bits(monkeypatch)


def student_weights(width):
    """Random weights whose convolutions have Student's distribution of the same deviation."""
    state, generator = random_weights("wan2.1", width), torch.Generator().manual_seed(1)
    for name, value in state.items():
        if name.endswith("weight") and value.ndim > 3:
            # Normal over the root of a chi square of 4 degrees.
            normal = torch.empty(5, *value.shape).normal_(generator=generator)
            noise = normal[0] / normal[1:].square().mean(0).sqrt()
            state[name] = noise * (value.std() / noise.std())
    return state


def error_db(frames, exact):
    """The squared error of frames in decibels."""
    error = (frames.double() - exact.double()).square().mean().item()
    return 10 * math.log10(max(error, 1e-30))


F32, BF16, NIGHTLY = torch.float32, torch.bfloat16, pytest.mark.nightly


@pytest.mark.parametrize(
    ("weights", "others", "side", "least"),
    [
        (lambda: student_weights(16), BF16, 64, -1),
        # Of the published widths.
        pytest.param(lambda: random_weights("wan2.1"), BF16, 96, 0.05, marks=NIGHTLY),
        pytest.param(lambda: random_weights("wan2.2"), F32, 48, 0.05, marks=NIGHTLY),
    ],
)
def test_a_decode_loses_a_decibel_and_a_half_at_most(weights, others, side, least):
    weights = weights()
    vae = load_vae(weights, dtype=F32)
    latent = latent_for(vae, 3, side, side)
    exact = vae.decode(latent)
    rough = error_db(load_vae(weights, dtype=BF16).decode(latent), exact)
    coded = prepared(load_vae(weights, dtype=others, precision="int8"))
    assert error_db(coded.decode(latent), exact) <= rough + MOST_DB
    assert coded.int8_layers(others).share > least


def test_the_cheapest_convolutions_are_chosen_within_the_budget(monkeypatch):
    """Errors of one are 0.1 of that of bfloat16, and half more together; one costs over 1 dB."""
    network, result, work = load_vae(STATES["wan2.1"](), dtype=F32).decoder, layers._result, {}
    x = layers.probe(16, 2)
    exact = result(network, x, F32, frozenset())

    def planned(_, x, dtype, names):
        if dtype == F32 and not names:
            return result(network, x, dtype, names)
        together = 1.5 if len(names) > 1 else 1
        error = 1.0 if dtype == BF16 else together * sum(work.get(name, 0.1) for name in names)
        return exact + error**0.5

    monkeypatch.setattr(layers, "_result", planned)
    first = layers.choose(network, x, F32, lambda: True)
    by_share = sorted(first.rows, key=lambda row: -row.share)
    assert len(by_share) > 12
    assert [row.chosen for row in by_share] == [True] * 8 + [False] * (len(by_share) - 8)
    work[by_share[0].name] = 0.3
    second = layers.choose(network, x, F32, lambda: True)
    assert second.names == {row.name for row in by_share[1:9]}
    losses = {row.name: round(row.loss_db, 2) for row in second.rows}
    assert {*losses.values()} == {0.41, 1.14}
    assert losses[by_share[0].name] == 1.14
    assert abs(second.share - sum(row.share for row in by_share[1:9])) < 1e-9
