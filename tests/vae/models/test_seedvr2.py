"""What is SeedVR2's own: the scale of its latents, its folded upsampling, bands of rows."""

import pytest
import torch

from fast_video_vae.tests.seedvr2 import SCALE, random_seedvr2
from fast_video_vae.tests.vae.families import Convolutions, joined, random_frames, random_latent
from fast_video_vae.tests.vae.models.seedvr2_oracle import Oracle, PlainUpsample
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.models import seedvr2
from fast_video_vae.vae.planning import candidates


@pytest.fixture(scope="module")
def state():
    return random_seedvr2((32, 32, 64, 64))


def test_latents_are_scaled_and_have_no_statistics(state):
    vae = load_vae(state, dtype=torch.float32)
    assert vae.config.latent_scale == SCALE == 0.9152
    latent = random_latent(1, 16, 1, 2, 2)
    assert torch.equal(vae.normalize(latent), latent)
    assert torch.equal(vae.denormalize(latent), latent)
    frames = random_frames(1, 3, 5, 16, 16)
    mean = joined(vae.encode_stream(frames, scaled=False))
    assert torch.equal(mean * SCALE, vae.encode(frames))


@pytest.mark.parametrize("name", ["upscale_conv.weight", "upscale_conv.bias", "conv.weight"])
@pytest.mark.parametrize("behind", [False, True])
def test_changed_parameters_update_the_folded_weights(state, name, behind):
    """`behind`: changed through `.data`, which autograd does not record."""
    vae, latent = load_vae(state, dtype=torch.float32), random_latent(1, 16, 3, 2, 2)
    vae.decode(latent)
    parameter = vae.get_parameter(f"decoder.up_blocks.1.upsamplers.0.{name}")
    with torch.no_grad():
        target = parameter.data if behind else parameter
        target.mul_(-2)
    changed = load_vae(vae.state_dict(), dtype=torch.float32)
    assert torch.equal(vae.decode(latent), changed.decode(latent))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_the_folded_upsampling_is_as_accurate_in_half_precision(state, dtype, monkeypatch):
    latent = random_latent(1, 16, 3, 2, 2)
    oracle = Oracle({name: value.double() for name, value in state.items()})
    expected, errors = oracle.decode(latent.double()), []
    for form in (seedvr2.SeedVR2Upsample, PlainUpsample):
        monkeypatch.setattr(seedvr2, "SeedVR2Upsample", form)
        frames = load_vae(state, dtype=dtype).decode(latent).double()
        errors.append(((frames - expected).norm() / expected.norm()).item())
    assert errors[0] <= 1.1 * errors[1]
    assert errors[1] <= 16 * torch.finfo(dtype).eps


@pytest.mark.usefixtures("plans_anew")
def test_a_convolution_reads_one_band_at_a_time_where_memory_is_short(state, monkeypatch):
    """A convolution reads the size of a band, not of three frames."""
    vae = load_vae(state, dtype=torch.float32)
    latent = random_latent(1, 16, 2, 8, 8)
    vae.decode(latent)
    read = []
    monkeypatch.setattr(candidates, "_SMALLEST_PART_BYTES", 1)
    for limit in (1 << 30, 1):
        vae.limit_bytes = limit
        with Convolutions() as convolutions:
            vae.decode(latent)
        read.append((convolutions.largest, convolutions.count))
    assert read[1][0] * 4 < read[0][0]
    assert read[1][1] > 4 * read[0][1]
