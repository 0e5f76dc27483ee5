"""The error of a video that no VAE can take says where it is wrong, and who made it."""

import functools
import math

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.vae.families import STATES, latent_for, random_frames
from fast_video_vae.vae import StreamOptions, load_vae, validation

STEP = StreamOptions(1)
LATENT = (
    "latent has {} values that are NaN or infinite; expected none: latent frame {} (from 0), made "
    "by a sampler or node, not the VAE$"
)
FRAMES = (
    "frames has {} values that are NaN or infinite; expected none: frame {} (from 0), made by "
    "another node, not the VAE$"
)


def said(line, *words):
    return "^" + line.replace("(from 0)", r"\(from 0\)").format(*words)


@functools.cache
def vae_of(family):
    return load_vae(STATES[family](), dtype=torch.float32)


@pytest.fixture(params=["wan2.1", "seedvr2"])
def vae(request):
    return vae_of(request.param)


def given(vae, latents=4, batch=1):
    """A latent, and frames."""
    side = 2 * vae.config.spatial_compression
    frames = random_frames(batch, vae.config.image_channels, vae.config.frames(latents), side, side)
    return latent_for(vae, latents, side, side, batch), frames


def spoil(x, *places, value=math.nan):
    """Make a value of each place, a video and a frame, wrong."""
    for video, frame in places:
        x[video, -1, frame, -1, 0] = value
    return x


def test_a_latent_is_refused_with_its_first_bad_frame(vae):
    latent = spoil(spoil(given(vae)[0], (0, 3)), (0, 2), value=-math.inf)
    match = said(LATENT, 2, "2 of 4")
    with refused(match):
        vae.decode(latent)
    with refused(match):
        vae.decode_stream(latent, frames=range(1))  # the bad frames are not of this part
    with refused(said(LATENT, 2, "2")):
        list(vae.decode_stream(iter(latent.split([1, 3], dim=2)), STEP))


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(2, 0), (0, 1)], (2, "0 of 4, video 2 of 3")),
        ([(2, 3), (0, 3)], (2, "3 of 4, video 0 of 3")),
    ],
)
def test_a_batch_has_the_number_of_the_video_and_of_its_frame(places, words):
    vae = vae_of("wan2.1")
    latent = spoil(given(vae, batch=3)[0], *places)
    with refused(said(LATENT, *words)):
        vae.decode(latent)
    with refused(said(LATENT, "[12]", words[1].replace(" of 4", ""))):
        list(vae.decode_stream(iter(latent.split(1, dim=2)), STEP, frames=range(12, 13)))


def test_a_long_latent_is_checked_in_runs(monkeypatch):
    monkeypatch.setattr(validation, "_CHECKED_AT_ONCE", 1)
    latent = spoil(given(vae_of("wan2.1"))[0].bfloat16(), (0, 3))
    with refused(said(LATENT, 1, "3 of 4")):
        vae_of("wan2.1").decode(latent)


def test_frames_are_refused_with_the_first_bad_one(vae):
    frames = given(vae, batch=2)[1]
    count = frames.shape[2]
    spoil(frames, (1, 2), (0, 3), value=math.inf)
    with refused(said(FRAMES, "2", f"2 of {count}, video 1 of 2")):
        vae.encode(frames)
    with refused(said(FRAMES, "[12]", "2, video 1 of 2")):
        list(vae.encode_stream(iter(frames.split(2, dim=2)), STEP))


MODELS = {16: "Wan 2.1, 2.2 14B, Qwen-Image, SeedVR2", 48: "Wan 2.2 5B", 64: "Qwen-Image 2.1"}


@pytest.mark.parametrize("family", STATES)
def test_the_channels_of_other_models_are_named(family):
    vae = vae_of(family)
    needed = vae.config.latent_channels
    for channels in {4, 16, 48, 64} - {needed}:
        other = f"a VAE for {MODELS[channels]}, or " if channels in MODELS else ""
        line = f"^latent has {channels} channels; this VAE needs {needed}: use {other}a latent for "
        latent = torch.zeros(1, channels, 2, 2, 2)
        with refused(f"{line}{MODELS[needed]}$"):
            vae.decode(latent)
        with refused(f"{line}{MODELS[needed]}$"):
            list(vae.decode_stream(iter([latent])))
