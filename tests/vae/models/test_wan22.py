"""What is particular to the Wan 2.2 layout; see test_families.py for the rest."""

import pytest
import torch

from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.vae.families import (
    Convolutions,
    random_frames,
    random_latent,
    relative_error,
)
from fast_video_vae.tests.wan22 import diffusers_wan22_name, random_qwen21, random_wan22
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.models.wan22 import DownStage, UpStage


@pytest.fixture(scope="module")
def state():
    return random_wan22(8, 16)


@pytest.fixture(scope="module")
def vae(state):
    return load_vae(state, dtype=torch.float32)


@pytest.fixture(scope="module")
def pictures():
    return load_vae(random_qwen21(), dtype=torch.float32)


def test_pictures_know_no_time(pictures):
    latent = random_latent(1, 64, 3, 3, 2)
    with Convolutions() as convolutions:
        apart = [pictures.decode(latent[:, :, i : i + 1]) for i in range(3)]
    assert set(convolutions.dimensions) == {4}
    for chunk in (None, 1, 2, -1):
        assert torch.equal(pictures.decode(latent, chunk), torch.cat(apart, dim=2))
    images = random_frames(1, 4, 3, 48, 32)
    apart = [pictures.encode(images[:, :, i : i + 1]) for i in range(3)]
    assert torch.equal(pictures.encode(images), torch.cat(apart, dim=2))


def test_the_names_of_diffusers_are_read(state, vae):
    other = load_vae({diffusers_wan22_name(k): v for k, v in state.items()}, dtype=torch.float32)
    assert all(map(torch.equal, other.state_dict().values(), vae.state_dict().values()))
    flat = random_qwen21()
    renamed = {}
    for key, value in flat.items():
        name = diffusers_wan22_name(key)
        renamed[name] = value.squeeze(2) if value.ndim == 5 else value
    ours, theirs = load_vae(flat).state_dict(), load_vae(renamed).state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_pruned_decoder_loads_by_its_shapes(state):
    # Narrower than its encoder asks for, and not by the same factor in every stage.
    narrow = random_wan22(8, 4)
    pruned = {key: (narrow if key.startswith("decoder.") else state)[key] for key in state}
    vae = load_vae(pruned, dtype=torch.float32)
    assert (vae.config.encoder_width, vae.config.decoder_width) == (8, 4)
    peer = diffusers_vae(narrow | {
        key: state[key] for key in state if key.startswith(("encoder.", "conv"))
    })  # fmt: skip
    latent = random_latent(1, 48, 3, 2, 3)
    assert relative_error(vae.decode(latent).clamp(-1, 1), peer.decode(latent)) <= 1e-5


def test_widths_that_a_shortcut_cannot_serve_are_one_line():
    with pytest.raises(ValueError, match="16 numbers for 7 channels"):
        UpStage(7, 4, space=True, time=False, taps=3)
    with pytest.raises(ValueError, match="28 numbers for 8 channels"):
        DownStage(7, 8, space=True, time=False, taps=3)
