"""Tiny decoders: the published network's frames for any chunk, bounded memory, readable errors."""

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.tiny import TinyOracle, random_tiny
from fast_video_vae.tests.vae.families import Pads
from fast_video_vae.tests.vae.planning.live_bytes import LiveBytes
from fast_video_vae.vae.models.latent_stats import latent_statistics
from fast_video_vae.vae.preview import load_tiny_decoder

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def states():
    return {channels: random_tiny(channels) for channels in (16, 48)}


@pytest.fixture(scope="module")
def load(states, tmp_path_factory):
    """Load a file of a name, with random weights unless others are given."""
    folder = tmp_path_factory.mktemp("vae_approx")

    def loaded(
        name="lighttaew2_1.safetensors",
        channels=16,
        state=None,
        dtype=torch.float32,
        normalizes=None,
    ):
        path = folder / name
        state = states[channels] if state is None else state
        if path.suffix == ".pth":
            torch.save(state, path)
        else:
            save_file(state, path)
        return load_tiny_decoder(path, dtype=dtype, normalizes=normalizes)

    return loaded


def latent(channels=16, frames=3, batch=1, size=(3, 4)):
    generator = torch.Generator().manual_seed(frames)
    return torch.randn(batch, channels, frames, *size, generator=generator)


@pytest.mark.parametrize("channels", [16, 48])
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_frames_are_those_of_the_published_network(load, states, channels, frames):
    decoder, x = load(channels=channels), latent(channels, frames)
    expected = TinyOracle(states[channels])(x)
    scale = decoder.spatial_compression
    assert expected.shape == (1, 3, 4 * frames - 3, 3 * scale, 4 * scale)
    for chunk in (None, 1, 2, 3, -1):
        with Pads() as pads:
            assert (decoder.decode(x, chunk) - expected).abs().max() <= TOLERANCE
        assert not pads.seen
    pieces = [piece.shape[2] for piece in decoder.decode_stream(x, 2)]
    assert pieces == {1: [1], 2: [5], 5: [5, 8, 4]}[frames]


def test_a_batch_is_decoded_video_by_video(load, states):
    x = latent(frames=3, batch=2)
    expected = torch.cat([TinyOracle(states[16])(each[None]) for each in x])
    assert (load().decode(x, 2) - expected).abs().max() <= TOLERANCE


def test_half_precision_is_near_float32(load):
    x = latent(frames=3)
    expected = load().decode(x)
    for dtype in (torch.bfloat16, torch.float16):
        frames = load(dtype=dtype).decode(x)
        assert frames.dtype == dtype
        # 24 convolutions, each rounded twice.
        error = (frames.float() - expected).abs().max() / expected.abs().max()
        assert error <= 48 * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize(
    ("name", "dtype", "given", "normalizes"),
    [
        ("taew2_1.pth", torch.float16, None, True),
        ("taew2_1.safetensors", torch.float32, None, True),
        ("lighttaew2_1.pth", torch.float16, None, False),
        ("LightTAEw2_1.pth", torch.bfloat16, None, False),
        ("mine.safetensors", torch.float16, False, False),
        ("mine.safetensors", torch.float32, True, True),
    ],
)
@pytest.mark.parametrize("channels", [16, 48])
def test_the_name_or_else_the_caller_says_which_latents_a_file_expects(
    load, states, name, dtype, given, normalizes, channels
):
    state = {key: value.to(dtype) for key, value in states[channels].items()}
    decoder, x = load(name, channels, state, normalizes=given), latent(channels, 2)
    assert decoder.normalizes is normalizes
    expected = x
    if normalizes:
        mean, std = (torch.tensor(v).view(-1, 1, 1, 1) for v in latent_statistics(channels))
        expected = (x - mean) / std
    wide = {key: value.float() for key, value in state.items()}
    assert (decoder.decode(x) - TinyOracle(wide)(expected)).abs().max() <= TOLERANCE


def test_a_name_that_does_not_say_which_latents_it_expects_is_refused(load):
    with refused("taehv.safetensors", "name does not say", "argument normalizes"):
        load("taehv.safetensors")


def test_an_encoder_in_the_file_is_ignored(load, states):
    state = states[16] | {"encoder.0.weight": torch.zeros(64, 3, 3, 3)}
    expected = load().decode(latent())
    assert torch.equal(load("light_both.pth", state=state).decode(latent()), expected)


def test_memory_does_not_grow_with_the_length(load):
    decoder, peaks = load(), []
    for frames in (4, 12):
        x = latent(frames=frames, size=(8, 8))
        decoder.decode(x[:, :, :2], 1)  # derives the weights
        counter = LiveBytes()
        counter.ignore(x)
        for tensor in decoder.state_dict().values():
            counter.ignore(tensor)
        with counter:
            for piece in decoder.decode_stream(x, 1):
                del piece
        peaks.append(counter.peak)
    assert peaks[1] <= 1.02 * peaks[0]
    assert peaks[1] <= decoder.peak_bytes((1, 16, 12, 8, 8), 1) <= 1.5 * peaks[1]


def test_wrong_arguments_are_refused_before_work(load):
    decoder = load()
    with refused("latent has 48 channels; this VAE needs 16"):
        decoder.decode_stream(latent(48))
    with refused("latent has 4 dimensions"):
        decoder.decode(latent()[0])
    with refused("latent is torch.int64|latent is int64"):
        decoder.decode(latent().long())
    with refused("chunk is 0; expected at least 1"):
        decoder.decode(latent(), 0)


def test_files_of_other_kinds_are_refused_in_one_line(load, states, tmp_path):
    state = states[16]
    with refused("tiny.pth", "decoder.22.bias is missing"):
        load("tiny.pth", state={"decoder.1.weight": torch.zeros(256, 16, 3, 3)})
    with refused("tiny.pth", "32 latent channels; expected 16 or 48"):
        wide = {"decoder.1.weight": torch.zeros(256, 32, 3, 3)}
        load("tiny.pth", state=state | wide)
    missing = {key: value for key, value in state.items() if "decoder.9." not in key}
    with refused("tiny.pth", "6 missing, such as decoder.9.conv.0.weight"):
        load("tiny.pth", state=missing)
    with refused("tiny.pth", "decoder.8.weight is [64, 256, 3, 3]", "needs [128, 256, 3, 3]"):
        load("tiny.pth", state=state | {"decoder.8.weight": torch.zeros(64, 256, 3, 3)})
    with refused("tiny.pth", "decoder.22.bias holds NaN"):
        load("tiny.pth", state=state | {"decoder.22.bias": torch.full((3,), torch.nan)})
    with refused("tiny.pth", "decoder.22.bias is torch.int64"):
        load("tiny.pth", state=state | {"decoder.22.bias": torch.zeros(3, dtype=torch.long)})
    path = tmp_path / "no.pth"
    with refused("no.pth", "does not exist", error=FileNotFoundError):
        load_tiny_decoder(path)
    path.write_text("hello")
    with refused("no.pth"):
        load_tiny_decoder(path)
