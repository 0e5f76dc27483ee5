"""Whole encodes and decodes on played devices of each kind, next to those on the CPU."""

import contextlib
from collections import defaultdict

import pytest
import torch

from fast_video_vae.kernels import use_backend
from fast_video_vae.kernels.devices import memory
from fast_video_vae.tests.played_devices import TYPES, Played, Waits, played
from fast_video_vae.tests.vae.families import (
    STATES,
    joined,
    latent_for,
    random_frames,
    relative_error,
)
from fast_video_vae.vae.checkpoint import load_vae
from fast_video_vae.vae.planning import plan
from fast_video_vae.vae.streaming.options import StreamOptions

SIZE = 32


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Return a function that starts to play a device, until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda kind, **options: stack.enter_context(
            played(kind, monkeypatch, tmp_path, **options)
        )


def loaded(family="wan2.1", device="cpu", dtype=torch.float32):
    return load_vae(STATES[family](), device=device, dtype=dtype)


def pixels_for(vae, frames, size=SIZE):
    return random_frames(1, vae.config.image_channels, frames, size, size)


def near(actual, expected, share=1e-5):
    """The result was on the device, and is that of the CPU."""
    assert isinstance(actual, Played)
    assert relative_error(actual.cpu(), expected) <= share


@pytest.mark.parametrize(
    ("kind", "family", "frames", "tile"),
    [
        ("nvidia", "wan2.1", 9, (32, 16)),
        ("amd", "qwen-image-2.1", 1, None),
        ("apple", "seedvr2", 5, None),
    ],
)
def test_frames_and_latents_are_those_of_the_cpu(kind, family, frames, tile, play):
    options, plain = StreamOptions(chunk=2, tile=tile), loaded(family)
    pixels = pixels_for(plain, frames)
    latent = joined(plain.encode_stream(pixels, options))
    video = joined(plain.decode_stream(latent, options))
    device = play(kind)
    vae = loaded(family, TYPES[kind])
    assert isinstance(next(vae.parameters()), Played)
    near(joined(vae.encode_stream(pixels, options)), latent)
    near(joined(vae.decode_stream(latent, options)), video)
    assert not device.faults


def test_an_encode_of_frames_on_the_device_waits_three_times(play):
    """For stale weights, for static frames and for values that are not finite."""
    plain = loaded()
    pixels = pixels_for(plain, 21, 16)
    pixels[:, :, 8:] = pixels[:, :, 7:8]
    latent = plain.encode(pixels, 1)
    device = play("nvidia")
    vae, there = loaded(device="cuda"), pixels.to("cuda")
    vae.encode(there, 1)
    with Waits("cuda") as seen:
        near(vae.encode(there, 1), latent)
    assert seen.count == 3
    assert not device.faults


def test_16_bits_are_computed_where_conv3d_is_missing(play):
    plain, dtype = loaded(), torch.float16
    latent = latent_for(plain, 2, SIZE, SIZE)
    video, latents = plain.decode(latent, 2), plain.encode(pixels_for(plain, 5), 2)
    device = play("apple", conv3d_narrow=False)
    vae = loaded(device="mps", dtype=dtype)
    # A random network adds the roundings of its 30 convolutions and norms.
    share, pixels = 40 * torch.finfo(dtype).eps, pixels_for(vae, 5)
    near(vae.decode(latent, 2), video, share)
    near(vae.encode(pixels, 2), latents, share)
    assert not device.faults


def test_a_device_without_float64_takes_and_gives_it(play):
    """Pixels and latents, and frames that arrive on the host."""
    plain = loaded()
    pixels, latent = pixels_for(plain, 5).double(), latent_for(plain, 2, SIZE, SIZE).double()
    latents, video = plain.encode(pixels), plain.decode(latent)
    device = play("apple")
    vae, out = loaded(device="mps"), torch.zeros(1, 3, 5, SIZE, SIZE, dtype=torch.float64)
    near(vae.encode(pixels), latents)
    list(vae.decode_stream(latent, out=out))
    assert relative_error(out, video.double()) <= 1e-5
    assert not device.faults


@pytest.mark.parametrize(("kind", "numbers"), [("amd", torch.uint8), ("apple", torch.uint16)])
def test_numbers_of_pictures_are_converted_on_the_device(kind, numbers, play):
    """Of an encode's frames, and of a decode's images, which arrive on the host."""
    plain, white = loaded(), torch.iinfo(numbers).max
    frames = ((pixels_for(plain, 5) + 1) / 2 * white).int().to(numbers)
    latent = plain.encode(frames.float() / white * 2 - 1)
    expected, actual = (torch.zeros(1, 5, SIZE, SIZE, 3, dtype=numbers) for _ in range(2))
    list(plain.decode_stream(latent, images=expected))
    device = play(kind)
    vae = loaded(device=TYPES[kind])
    near(vae.encode(frames), latent)
    list(vae.decode_stream(latent, images=actual))
    assert (actual.double() - expected.double()).abs().max() <= (1 if white == 255 else 2)
    assert expected.double().max() > 0.5 * white
    assert not device.faults


@pytest.mark.parametrize(
    ("macos", "dtype", "line"),
    [
        (15, torch.float64, "dtype is float64, but Apple GPUs have no float64; expected"),
        (13, torch.bfloat16, "dtype is bfloat16, but bfloat16 needs macOS 14"),
    ],
)
def test_what_a_device_does_not_compute_is_refused_in_one_line(macos, dtype, line, play):
    device = play("apple", macos=macos)
    with pytest.raises(ValueError, match=f"^{line}[^\n]*$"):
        loaded(device="mps", dtype=dtype)
    vae = loaded(device="mps")
    latent = latent_for(vae, 1, SIZE, SIZE)
    with pytest.raises(ValueError, match=f"^{line}[^\n]*$"):
        vae.decode_stream(latent, StreamOptions(dtype=dtype))
    assert not device.calls
    default = load_vae(STATES["wan2.1"](), device="mps").dtype
    assert (default == torch.float32) == (macos == 13)


def test_a_device_without_any_memory_leaves_the_rest_to_the_cpu(play, caplog):
    plain = loaded()
    latent, pixels = latent_for(plain, 4, 16, 16), pixels_for(plain, 5, 16)
    video, latents = plain.decode(latent, 1), plain.encode(pixels, 1)
    play("apple")
    vae, failing = loaded(device="mps"), []

    def full(layer, inputs):
        if isinstance(inputs[0], Played) and failing:
            raise torch.OutOfMemoryError("no memory")

    for network in (vae.decoder, vae.encoder):
        network.layers()[-1].register_forward_pre_hook(full)
    weights = [parameter.data_ptr() for parameter in vae.parameters()]
    out, pieces = vae.new_frames(latent), []
    for piece in vae.decode_stream(latent, StreamOptions(1), out=out):
        pieces.append(piece.cpu())
        if len(pieces) == 2:
            failing.append(True)
    assert relative_error(torch.cat(pieces, dim=2), video) <= 1e-5
    assert relative_error(out.cpu(), video) <= 1e-5
    near(vae.encode(pixels), latents)
    assert [parameter.data_ptr() for parameter in vae.parameters()] == weights
    assert not vae.replicas.nbytes()
    warned = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert [each.split(";")[0] for each in warned] == [
        "Fast Video VAE: memory ran out in a decode at frame 9",
        "Fast Video VAE: memory ran out in an encode at frame 0",
    ]


@pytest.mark.parametrize(("family", "encodes"), [("wan2.1", True), ("seedvr2", False)])
def test_a_layer_has_one_shape_in_all_steady_steps_on_amd(family, encodes, play):
    """After the first frame, the weight of a layer meets one shape in videos of all lengths."""
    device, found = play("amd"), defaultdict(set)
    vae, options = loaded(family, "cuda"), StreamOptions(chunk=2)
    for frames in (9, 21):
        latents = vae.config.latent_frames(frames)
        with use_backend("aten"):
            if encodes:
                stream = vae.encode_stream(pixels_for(vae, frames, 16), options)
            else:
                stream = vae.decode_stream(latent_for(vae, latents, 16, 16), options)
            count = next(stream).shape[2]
            device.calls.clear()
            count += sum(piece.shape[2] for piece in stream)
        assert count == (latents if encodes else frames)
        for call in device.calls:
            found[call[0]].add(call)
    assert {len(calls) for calls in found.values()} == {1}
    assert not device.faults


def test_tensors_that_a_device_cannot_hold_are_cut_or_refused(play, monkeypatch):
    plain = loaded()
    latent = latent_for(plain, 2, 64, 64)
    video = joined(plain.decode_stream(latent))
    device = play("apple")
    monkeypatch.setattr(memory, "_METAL_BYTES", 1 << 20)
    monkeypatch.setattr(plan, "_PARTS", (1 << 18,))  # a quarter of the limit, as on a real one
    monkeypatch.setattr(plan, "_SMALL_PARTS", ())
    vae, out = loaded(device="mps"), torch.empty(video.shape)
    list(vae.decode_stream(latent, out=out))
    assert relative_error(out, video) <= 1e-5
    assert not device.faults
    with pytest.raises(ValueError, match="too many for a tensor on mps"):
        vae.decode(latent_for(vae, 20, 64, 64))
    device.calls.clear()
    monkeypatch.setattr(memory, "_METAL_BYTES", 1 << 18)
    vae = loaded("seedvr2", "mps")  # never tiled
    assert vae.plan(64, 64, encode=True).peak_bytes < 1 << 40
    with pytest.raises(ValueError, match=r"^the frames are 64 x 64 .*large for a tensor on mps.*$"):
        vae.encode(pixels_for(vae, 5, 64))
    assert not device.calls
