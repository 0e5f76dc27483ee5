"""A dtype that is slow on a CPU is computed in float32; results keep the requested dtype."""

import functools

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import (
    STATES,
    computes_16_bits,
    joined,
    latent_for,
    random_frames,
)
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.streaming import precision
from fast_video_vae.vae.streaming.precision import compute_dtype

HALF = torch.float16


@pytest.fixture
def slow_half(monkeypatch):
    """Compute as on a CPU with slow convolutions in float16, whatever this one measures."""
    monkeypatch.setattr(precision, "_is_slow", lambda dtype: dtype == HALF)


def pair(family="wan2.1"):
    """Return a VAE in float16, and one in float32 with the same weights."""
    state = STATES[family]()
    return load_vae(state, dtype=HALF), load_vae(state, dtype=torch.float32, weights_dtype=HALF)


@pytest.mark.parametrize("family", ["wan2.1", "seedvr2"])
def test_results_are_float32_results_rounded_to_float16(slow_half, family):
    half, full = pair(family)
    cast = load_vae(STATES[family](), dtype=torch.float32).half()
    assert cast.dtype == cast.encode_dtype == HALF
    latent = random_frames(1, full.config.latent_channels, 2, 4, 4)
    frames = full.decode(latent)
    pieces = joined(half.decode_stream(latent, StreamOptions(1)))
    for found in (half.decode(latent), cast.decode(latent), pieces):
        assert torch.equal(found, frames.half())
    clip = random_frames(1, 3, 5, 32, 32)
    assert torch.equal(half.encode(clip), full.encode(clip).half())
    assert torch.equal(cast.float().decode(latent), frames)


def test_the_plan_uses_the_dtype_of_the_computation(slow_half):
    half, full = pair()
    assert half.plan(256, 256).peak_bytes == full.plan(256, 256).peak_bytes
    for dtype in (torch.float64, torch.float32):
        assert compute_dtype(dtype, torch.device("cpu")) == dtype
    for device in ("cuda", "meta", "mps"):
        assert compute_dtype(HALF, torch.device(device)) == HALF


def test_the_replaced_dtype_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(precision, "slow_on_cpu", lambda dtype: dtype == HALF)
    monkeypatch.setattr(precision, "_is_slow", functools.cache(precision._is_slow.__wrapped__))
    for _ in range(2):
        vae, _ = pair()
        vae.decode(torch.zeros(1, 16, 1, 2, 2))
        vae.encode(torch.zeros(1, 3, 1, 16, 16))
    (line,) = caplog.messages
    assert "this CPU has no instructions for float16 convolutions" in line
    assert "computing in float32, results stay float16" in line


def test_frames_for_a_deep_file_keep_the_precision_of_the_computation(monkeypatch):
    vae = load_vae(random_state_dict(8), dtype=torch.bfloat16)
    vae.allow_fp16 = True
    latent = latent_for(vae, 3, 16, 16)
    computes_16_bits(monkeypatch)
    monkeypatch.setattr(precision, "fp16_pays", lambda device: True)
    images = torch.empty(1, 9, 16, 16, 3)
    for _ in vae.decode_stream(latent, images=images):
        pass
    frames = joined(vae.decode_stream(latent, deep=True))
    assert frames.dtype == torch.float32
    assert torch.equal(((frames + 1) / 2).clamp(0, 1).movedim(1, -1), images)
    # float16 has more bits.
    assert len(frames.unique()) > 1.1 * len(frames.bfloat16().unique())


def test_frames_for_a_deep_file_are_computed_in_float16_on_a_gpu(monkeypatch):
    monkeypatch.setattr(precision, "fp16_pays", lambda device: False)
    chosen = functools.partial(precision.decode_dtype, device=torch.device("cuda"), deep=True)
    assert chosen(torch.bfloat16, allow_fp16=True) == torch.float16
    assert chosen(torch.float32, allow_fp16=True) == torch.float32
    monkeypatch.setattr(precision, "check_computes", lambda dtype, device, name="": None)
    assert chosen(torch.bfloat16, allow_fp16=False) == torch.bfloat16
    assert precision.decode_dtype(torch.bfloat16, torch.device("cuda"), allow_fp16=True) == (
        torch.bfloat16
    )
