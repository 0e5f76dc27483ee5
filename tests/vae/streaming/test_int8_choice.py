"""What int8 costs: at most 1.5 dB next to bfloat16, with weights of any distribution."""

import math

import pytest
import torch

from fast_video_vae.tests.benchmarks.weights import random_weights
from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.vae.families import latent_for, prepared
from fast_video_vae.vae import CLIP_PATH, VAE_PATH, StreamOptions, load_vae
from fast_video_vae.vae.streaming import precision

MOST_DB = 1.5

pytestmark = pytest.mark.usefixtures("int8")


@pytest.fixture(autouse=True)
def computes_bfloat16(monkeypatch):
    """Also on a CPU that is slow in it."""
    monkeypatch.setattr(precision, "_is_slow", lambda dtype: False)


def weights_of(kind, width):
    """Random weights whose convolutions have another distribution of the same deviation."""
    state, generator = random_weights("wan2.1", width), torch.Generator().manual_seed(1)
    if kind == "normal":
        return state
    for name, value in state.items():
        if name.endswith("weight") and value.ndim > 3:
            if kind == "student":  # normal over the root of a chi square of 4 degrees
                normal = torch.empty(5, *value.shape).normal_(generator=generator)
                noise = normal[0] / normal[1:].square().mean(0).sqrt()
            else:
                noise = torch.rand(value.shape, generator=generator) - 0.5
            state[name] = noise * (value.std() / noise.std())
    return state


def error_db(frames, exact):
    """The squared error of frames in decibels."""
    error = (frames.double() - exact.double()).square().mean().item()
    return 10 * math.log10(max(error, 1e-30))


def losses(state, latent_of, others):
    """The errors of bfloat16 and of int8 next to float32, in decibels, and the share in int8."""
    vae = load_vae(state, dtype=torch.float32)
    latent = latent_of(vae)
    exact = vae.decode(latent)
    rough = error_db(load_vae(state, dtype=torch.bfloat16).decode(latent), exact)
    coded = prepared(load_vae(state, dtype=others, precision="int8"))
    result = error_db(coded.decode(latent), exact)
    share = coded.int8_layers(others).share
    print(f"bf16 {-rough:.2f} dB, int8 {-result:.2f} dB, share {share:.2f}")  # noqa: T201
    return rough, result, share


@each_value_once(kind=["normal", "student", "uniform"], others=[torch.float32, torch.bfloat16])
def test_a_decode_loses_a_decibel_and_a_half_at_most(kind, others):
    state = weights_of(kind, 16)
    rough, coded, share = losses(state, lambda vae: latent_for(vae, 3, 64, 64), others)
    assert coded <= rough + MOST_DB
    assert share > 0 or others == torch.bfloat16


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "others"),
    [("wan2.1", torch.float32), ("wan2.1", torch.bfloat16), ("wan2.2", torch.float32)],
)
def test_published_widths_lose_a_decibel_and_a_half_at_most(family, others):
    state, side = random_weights(family), 96 if family == "wan2.1" else 48
    rough, coded, share = losses(state, lambda vae: latent_for(vae, 3, side, side), others)
    assert coded <= rough + MOST_DB
    assert share > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("others", [torch.float32, torch.bfloat16])
def test_the_bundled_vae_loses_a_decibel_and_a_half_at_most(others):
    pytest.importorskip("av", reason="PyAV is not installed")
    from fast_video_vae.vae.media import read_video

    frames = torch.stack(list(read_video(CLIP_PATH).frames(dtype=torch.uint8))[:9])
    video = frames.movedim(-1, 0)[None]
    rough, coded, _ = losses(VAE_PATH, lambda vae: vae.encode(video), others)
    assert coded <= rough + MOST_DB


@pytest.mark.slow
def test_the_error_does_not_grow_over_129_frames():
    state = random_weights("wan2.1", 16)
    vae = load_vae(state, dtype=torch.float32)
    latent = latent_for(vae, 33, 64, 64)
    coded = prepared(load_vae(state, dtype=torch.float32, precision="int8"))
    exact, frames = vae.decode(latent), coded.decode(latent)
    ends = [
        error_db(frames[:, :, part], exact[:, :, part]) for part in (slice(1, 17), slice(-16, None))
    ]
    assert ends[1] - ends[0] <= 0.5


def test_the_choice_is_the_same_in_chunks_and_says_what_it_costs():
    state = random_weights("wan2.1", 8)
    vae = load_vae(state, dtype=torch.float32, precision="int8")
    layers = vae.int8_layers(torch.float32)
    assert layers is vae.int8_layers(torch.float32)
    assert 0 < layers.share < 1
    assert all(row.loss_db >= 0 for row in layers.rows)
    latent = latent_for(vae, 3, 16, 16)
    pieces = torch.cat(list(vae.decode_stream(latent, StreamOptions(1))), dim=2)
    assert torch.equal(pieces, vae.decode(latent, -1))
