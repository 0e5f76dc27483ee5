"""The VAE against other implementations of the same model, and against itself in other steps."""

import pytest
import torch

from fast_video_vae.tests.benchmarks.peers import (
    PeerUnavailableError,
    comfyui_vae,
    diffusers_vae,
)
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers import conv


def relative_error(actual, expected):
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def random_frames(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def random_latent(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def weights():
    return {width: random_state_dict(width) for width in (8, 96)}


@pytest.fixture(scope="module")
def pairs(weights):
    """Ours and diffusers', by width."""
    return {
        width: (load_vae(state, dtype=torch.float32), diffusers_vae(state))
        for width, state in weights.items()
    }


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("frames", [1, 5, 9, 17])
@pytest.mark.parametrize("width", [8, 96])
def test_equals_diffusers(pairs, width, frames, batch):
    size = (40, 24) if width == 8 else (16, 8)
    vae, peer = pairs[width]
    video = random_frames(batch, 3, frames, *size)
    expected = peer.encode(video)
    assert relative_error(vae.encode(video), expected) <= 1e-5
    # diffusers clamps what it decodes
    actual = vae.decode(expected)
    assert relative_error(actual.clamp(-1, 1), peer.decode(expected).clamp(-1, 1)) <= 1e-5


@pytest.mark.parametrize("frames", [1, 5, 13])
def test_equals_diffusers_qwen_image(weights, frames):
    vae = load_vae(weights[8], dtype=torch.float32)
    peer = diffusers_vae(weights[8], qwen_image=True)
    video = random_frames(1, 3, frames, 32, 48)
    expected = peer.encode(video)
    assert relative_error(vae.encode(video), expected) <= 1e-5
    actual = vae.decode(expected).clamp(-1, 1)
    assert relative_error(actual, peer.decode(expected).clamp(-1, 1)) <= 1e-5


@pytest.mark.comfyui
@pytest.mark.parametrize(
    ("width", "image_channels", "out_channels"),
    [
        (8, 3, 3),
        (24, 3, 3),  # LightVAE
        (8, 4, 4),  # Qwen-Image-Layered
    ],
)
def test_equals_comfyui(width, image_channels, out_channels):
    state = random_state_dict(width, image_channels=image_channels, out_channels=out_channels)
    try:
        peer = comfyui_vae(state)
    except PeerUnavailableError as error:
        pytest.skip(str(error))
    vae = load_vae(state, dtype=torch.float32)
    for frames in (1, 5, 17):
        video = random_frames(1, image_channels, frames, 24, 40)
        expected = peer.encode(video)
        assert relative_error(vae.encode(video), expected) <= 1e-5
        # not clamped, neither here nor there
        assert relative_error(vae.decode(expected), peer.decode(expected)) <= 1e-5


def test_a_2x_decoder_shuffles_its_channels_into_pixels():
    state = random_state_dict(8, out_channels=12)
    vae = load_vae(state, dtype=torch.float32)
    assert vae.config.output_scale == 2
    latent = random_latent(2, 16, 3, 3, 2)
    peer = diffusers_vae(state)
    twelve = peer.decode(latent)
    expected = torch.nn.functional.pixel_shuffle(twelve.movedim(2, 1), 2).movedim(1, 2)
    actual = vae.decode(latent)
    assert actual.shape == (2, 3, 9, 48, 32)
    assert relative_error(actual.clamp(-1, 1), expected) <= 1e-5
    assert vae.encode(random_frames(1, 3, 5, 16, 16)).shape == (1, 16, 2, 2, 2)


def test_decode_does_not_clamp(weights):
    state = dict(weights[8])
    state["decoder.head.2.bias"] = state["decoder.head.2.bias"] + 3
    assert load_vae(state).decode(random_latent(1, 16, 1, 2, 2)).max() > 2


# Every sum of parts that a stream of 9 latents could be cut into is equal; these are the kinds.
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 9, 100, -1, None])
def test_any_chunk_equals_latent_by_latent(weights, chunk):
    vae = load_vae(weights[8], dtype=torch.float32)
    video, latent = random_frames(1, 3, 33, 16, 24), random_latent(1, 16, 9, 2, 3)
    torch.testing.assert_close(
        vae.encode(video, chunk=chunk), vae.encode(video, chunk=1), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        vae.decode(latent, chunk=chunk), vae.decode(latent, chunk=1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("limit_bytes", [1, 20_000, 100_000])
def test_any_memory_limit_gives_the_same_frames(weights, limit_bytes):
    vae = load_vae(weights[8], dtype=torch.float32)
    video, latent = random_frames(2, 3, 17, 32, 16), random_latent(2, 16, 5, 4, 2)
    expected = vae.encode(video, chunk=-1), vae.decode(latent, chunk=-1)
    vae.limit_bytes = limit_bytes
    torch.testing.assert_close(vae.encode(video, chunk=-1), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vae.decode(latent, chunk=-1), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 17])
def test_pieces_of_any_length_encode_alike(weights, piece):
    vae = load_vae(weights[8], dtype=torch.float32)
    video = random_frames(1, 3, 17, 16, 16)
    for chunk in (None, 1, 3, -1):
        latents = list(vae.encode_stream(video.split(piece, dim=2), StreamOptions(chunk)))
        assert latents[0].shape[2] == 1
        torch.testing.assert_close(torch.cat(latents, 2), vae.encode(video), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("piece", [1, 2, 4, 5])
def test_pieces_of_any_length_decode_alike(weights, piece):
    vae = load_vae(weights[8], dtype=torch.float32)
    latent = random_latent(1, 16, 5, 2, 2)
    for chunk in (None, 1, 3, -1):
        frames = torch.cat(
            list(vae.decode_stream(latent.split(piece, dim=2), StreamOptions(chunk))), 2
        )
        torch.testing.assert_close(frames, vae.decode(latent), rtol=1e-5, atol=1e-5)


def test_a_longer_video_begins_with_the_latents_of_the_shorter(weights):
    vae = load_vae(weights[8], dtype=torch.float32)
    video = random_frames(1, 3, 17, 16, 16)
    short = vae.encode(video[:, :, :9])
    torch.testing.assert_close(vae.encode(video)[:, :, :3], short, rtol=1e-5, atol=1e-5)


def test_a_lone_frame_equals_the_first_of_a_video(weights):
    vae = load_vae(weights[8], dtype=torch.float32)
    video, latent = random_frames(1, 3, 9, 16, 16), random_latent(1, 16, 3, 2, 2)
    assert torch.equal(vae.encode(video[:, :, :1]), vae.encode(video)[:, :, :1])
    assert torch.equal(vae.decode(latent[:, :, :1]), vae.decode(latent)[:, :, :1])


@pytest.mark.parametrize("batch", [1, 2])
def test_plain_convolutions_equal_diffusers_too(weights, batch, monkeypatch):
    monkeypatch.setattr(conv, "packs", lambda _: False)  # as on a GPU
    vae = load_vae(weights[8], dtype=torch.float32)
    peer = diffusers_vae(weights[8])
    video = random_frames(batch, 3, 13, 24, 16)
    expected = peer.encode(video)
    assert relative_error(vae.encode(video, chunk=2), expected) <= 1e-5
    actual = vae.decode(expected, chunk=2).clamp(-1, 1)
    assert relative_error(actual, peer.decode(expected)) <= 1e-5


def test_frames_five_and_six_show_no_jump(weights):
    """A split in front of the temporal upsampling that loses one frame of history shows here."""
    vae = load_vae(weights[8], dtype=torch.float32)
    latent = random_latent(1, 16, 1, 2, 2).expand(-1, -1, 4, -1, -1)
    expected = diffusers_vae(weights[8]).decode(latent)
    for chunk in (1, 2, 3):
        actual = vae.decode(latent, chunk=chunk).clamp(-1, 1)
        torch.testing.assert_close(actual[:, :, 4:7], expected[:, :, 4:7], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_twice_diffusers_own(weights, dtype):
    state = weights[8]
    latent, video = random_latent(1, 16, 3, 4, 4), random_frames(1, 3, 9, 32, 32)
    exact, peer = diffusers_vae(state, dtype=torch.float64), diffusers_vae(state, dtype=dtype)
    vae = load_vae(state, dtype=dtype)
    frames, latents = exact.decode(latent), exact.encode(video)
    ours = relative_error(vae.decode(latent).clamp(-1, 1), frames)
    assert ours <= 2 * relative_error(peer.decode(latent), frames)
    assert relative_error(vae.encode(video), latents) <= 2 * relative_error(
        peer.encode(video), latents
    )
