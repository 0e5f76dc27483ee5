"""What `quality` promises: "exact" has the reference's bits, "fast" is no worse than others."""

import math

import pytest
import torch

from fast_video_vae.kernels import use_backend
from fast_video_vae.tests.benchmarks.peers import PeerUnavailableError, comfyui_vae
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.wan22 import random_wan22
from fast_video_vae.vae import VAE_PATH, load_vae, read_checkpoint

STATES = {"wan2.1": lambda: random_state_dict(16), "wan2.2": lambda: random_wan22(16, 16)}


def clip(frames, size, seed=0):
    """A soft moving pattern in [-1, 1]."""
    noise = torch.rand(1, 3, frames, 6, 6, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return torch.nn.functional.interpolate(noise, (frames, size, size), mode="trilinear")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", STATES)
def test_exact_has_the_bits_of_the_reference(family, dtype):
    state = STATES[family]()
    exact = load_vae(state, dtype=dtype, quality="exact")
    fast = load_vae(state, dtype=dtype, quality="fast")
    video = clip(9, 32)
    with use_backend("reference"):
        latent = fast.encode(video)
        frames = fast.decode(latent)
    assert torch.equal(exact.encode(video), latent)
    assert torch.equal(exact.decode(latent), frames)


def psnr(frames, expected):
    error = (frames.double().clamp(-1, 1) - expected.double().clamp(-1, 1)).square().mean().item()
    return 10 * math.log10(4 / error)


@pytest.mark.comfyui
@pytest.mark.parametrize("weights", ["random", "bundled"])
def test_fast_is_not_further_from_float32_than_comfyui_in_bfloat16(weights):
    state = random_state_dict(96) if weights == "random" else read_checkpoint(VAE_PATH).weights
    try:
        stock = comfyui_vae(state, dtype=torch.bfloat16)
    except PeerUnavailableError as error:
        pytest.skip(str(error))
    exact = load_vae(state, dtype=torch.float32)
    fast = load_vae(state, dtype=torch.bfloat16)
    size = 32 if weights == "random" else 128  # as wide as the published one
    latent = exact.encode(clip(9, size)).bfloat16()
    expected = exact.decode(latent)
    ours, theirs = (psnr(vae.decode(latent), expected) for vae in (fast, stock))
    assert ours >= theirs - 0.5
