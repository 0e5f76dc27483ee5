"""Whole encodes and decodes on played devices of each kind, next to those on the CPU."""

import contextlib
from collections import defaultdict

import pytest
import torch

from fast_video_vae.kernels import use_backend
from fast_video_vae.kernels.devices import memory
from fast_video_vae.tests.played_devices import TYPES, Played, played
from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.vae.families import (
    STATES,
    VIDEO,
    joined,
    latent_for,
    random_frames,
    relative_error,
)
from fast_video_vae.tests.vae.streaming import test_overflow
from fast_video_vae.tests.vae.streaming.waits import Waits
from fast_video_vae.vae.checkpoint import load_vae
from fast_video_vae.vae.streaming import precision
from fast_video_vae.vae.streaming.options import StreamOptions

KINDS = ("nvidia", "amd", "intel", "apple")
SIZE = 32
QUICK = (("wan2.1", 9, True), ("qwen-image-2.1", 1, False), ("seedvr2", 9, False))


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Return a function that starts to play a device, until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda kind, **options: stack.enter_context(
            played(kind, monkeypatch, tmp_path, **options)
        )


def loaded(family, device="cpu", dtype=torch.float32):
    return load_vae(STATES[family](), device=device, dtype=dtype)


def pixels_for(vae, frames, size=SIZE):
    return random_frames(1, vae.config.image_channels, frames, size, size)


def near(actual, expected, share=1e-5):
    """The result was on the device, and is that of the CPU."""
    assert isinstance(actual, Played)
    assert relative_error(actual.cpu(), expected) <= share


# By default a tiled video and an image of each kind, and the video of another network.
CASES = [
    pytest.param(family, frames, tile, marks=() if quick else pytest.mark.slow)
    for family in STATES
    for frames in (1, 9)
    for tile in (None, (32, 16))
    for quick in [(family, frames, bool(tile)) in QUICK]
]


@pytest.mark.parametrize(("family", "frames", "tile"), CASES)
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("moving", [33, 8])
def test_an_encode_of_frames_on_the_device_waits_three_times(moving, play):
    """For stale weights, for static frames and for values that are not finite."""
    plain = loaded("wan2.1")
    pixels = pixels_for(plain, 33, 16)
    pixels[:, :, moving:] = pixels[:, :, moving - 1 : moving]
    latent = plain.encode(pixels, 1)
    device = play("nvidia")
    vae, there = loaded("wan2.1", "cuda"), pixels.to("cuda")
    vae.encode(there, 1)
    with Waits("cuda") as seen:
        near(vae.encode(there, 1), latent)
    assert seen.count == 3
    assert not device.faults


def test_a_whole_decode_reads_its_overflow_flags_once(play, monkeypatch, caplog):
    monkeypatch.setattr(precision, "fp16_pays", lambda device: True)
    monkeypatch.setattr(precision, "_is_slow", lambda dtype: False)
    plain = test_overflow.fragile()
    latents = {bright: test_overflow.video(plain, 6, bright) for bright in (None, 0, 3, 5)}
    expected = {bright: test_overflow.wide(plain, x) for bright, x in latents.items()}
    for bright in (3, 5):
        expected[bright] = test_overflow.mixed(plain, latents[bright], bright)
    device = play("nvidia")
    vae, waits = test_overflow.fragile(device="cuda"), []
    for length in (2, 6):
        vae.decode(latents[None][:, :, :length], 1)
        with Waits("cuda") as seen:
            vae.decode(latents[None][:, :, :length], 1)
        waits.append(seen.count)
    assert waits[0] == waits[1]
    for bright, latent in latents.items():
        vae.allow_fp16 = True
        caplog.clear()
        near(vae.decode(latent, 1), expected[bright], 0.02)
        assert len(test_overflow.lines(caplog)) == (bright is not None)
    assert not device.faults


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
@pytest.mark.parametrize("kind", ["nvidia", "apple"])
def test_whole_numbers_are_converted_on_the_device(kind, dtype, play):
    plain, white = loaded("wan2.1"), torch.iinfo(dtype).max
    pixels = ((pixels_for(plain, 5) + 1) / 2 * white).int().to(dtype)
    latent = plain.encode(pixels.float() / white * 2 - 1)
    device = play(kind)
    near(loaded("wan2.1", TYPES[kind]).encode(pixels), latent)
    assert not device.faults


@each_value_once(kind=KINDS, dtype=[torch.bfloat16, torch.float16])
def test_16_bits_are_computed_where_conv3d_is_missing(kind, dtype, play):
    plain = loaded("wan2.1")
    latent = latent_for(plain, 3, SIZE, SIZE)
    video, latents = plain.decode(latent, 2), plain.encode(pixels_for(plain, 5), 2)
    device = play(kind, conv3d_narrow=False)
    vae = loaded("wan2.1", TYPES[kind], dtype)
    # A random network adds the roundings of its 30 convolutions and norms.
    share, pixels = 40 * torch.finfo(dtype).eps, pixels_for(vae, 5)
    near(vae.decode(latent, 2), video, share)
    near(vae.encode(pixels, 2), latents, share)
    assert not device.faults


@pytest.mark.parametrize("kind", ["intel", "apple"])
def test_frames_arrive_on_the_host_in_a_dtype_that_the_device_lacks(kind, play):
    plain = loaded("wan2.1")
    latent = latent_for(plain, 2, SIZE, SIZE)
    expected, out = plain.decode(latent), torch.zeros(1, 3, 5, SIZE, SIZE, dtype=torch.float64)
    device = play(kind)
    for _ in loaded("wan2.1", TYPES[kind]).decode_stream(latent, out=out):
        pass
    assert relative_error(out, expected.double()) <= 1e-5
    assert not device.faults


@pytest.mark.parametrize("images", [torch.float32, torch.uint8, torch.uint16])
@pytest.mark.parametrize("kind", KINDS)
def test_images_arrive_on_the_host(kind, images, play):
    plain = loaded("wan2.1")
    latent = latent_for(plain, 3, SIZE, SIZE)
    expected, actual = (torch.zeros(1, 9, SIZE, SIZE, 3, dtype=images) for _ in range(2))
    for _ in plain.decode_stream(latent, images=expected):
        pass
    device = play(kind)
    for _ in loaded("wan2.1", TYPES[kind]).decode_stream(latent, images=actual):
        pass
    most = {torch.uint8: 1, torch.uint16: 2, torch.float32: 1e-5}[images]
    assert (actual.double() - expected.double()).abs().max() <= most
    assert expected.double().max() > 0.5 * (
        1 if images == torch.float32 else torch.iinfo(images).max
    )
    assert not device.faults


@pytest.mark.parametrize(
    ("kind", "options", "dtype", "line"),
    [
        ("apple", {}, torch.float64, "dtype is float64, but Apple GPUs have no float64; expected"),
        ("apple", {"macos": 13}, torch.bfloat16, "dtype is bfloat16, but bfloat16 needs macOS 14"),
        (
            "intel",
            {},
            torch.float64,
            "dtype is float64, but a GPU .intel. has no float64; expected",
        ),
    ],
)
def test_what_a_device_does_not_compute_is_refused_in_one_line(kind, options, dtype, line, play):
    device = play(kind, **options)
    with pytest.raises(ValueError, match=f"^{line}[^\n]*$"):
        loaded("wan2.1", TYPES[kind], dtype)
    vae = loaded("wan2.1", TYPES[kind])
    latent = latent_for(vae, 1, SIZE, SIZE)
    with pytest.raises(ValueError, match=f"^{line}[^\n]*$"):
        vae.decode_stream(latent, StreamOptions(dtype=dtype))
    assert not device.calls


def test_the_default_dtype_is_one_that_the_device_computes(play):
    play("apple", macos=13)
    assert load_vae(STATES["wan2.1"](), device="mps").dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_float64_pixels_and_latents_are_taken(kind, play):
    plain = loaded("wan2.1")
    pixels, latent = pixels_for(plain, 5).double(), latent_for(plain, 2, SIZE, SIZE).double()
    expected = plain.encode(pixels), plain.decode(latent)
    play(kind)
    vae = loaded("wan2.1", TYPES[kind])
    near(vae.encode(pixels), expected[0])
    near(vae.decode(latent), expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_that_runs_out_of_memory_continues(kind, play):
    plain = loaded("wan2.1")
    latent = latent_for(plain, 3, SIZE, SIZE)
    video = plain.decode(latent, 1)
    device = play(kind)
    vae = loaded("wan2.1", TYPES[kind])
    frames = vae.new_frames(latent)
    device.run_out(after=5)
    for _ in vae.decode_stream(latent, StreamOptions(chunk=1), out=frames):
        pass
    near(frames, video)
    assert device.ran_out


@pytest.mark.parametrize(
    "family", ["wan2.1", *(pytest.param(each, marks=pytest.mark.slow) for each in VIDEO[1:])]
)
@pytest.mark.parametrize("encodes", [False, True])
def test_a_layer_has_one_shape_in_all_steady_steps_on_amd(family, encodes, play):
    check_shapes(family, encodes, (5, 9, 17, 21), 2, play)


@pytest.mark.nightly
@pytest.mark.parametrize("family", VIDEO)
@pytest.mark.parametrize("encodes", [False, True])
def test_a_layer_has_one_shape_in_videos_of_any_length_on_amd(family, encodes, play):
    check_shapes(family, encodes, (5, 81, 1025), 4, play)


def check_shapes(family, encodes, lengths, chunk, play):
    """After the first frame, the weight of a layer meets one shape in videos of all lengths."""
    device, found = play("amd"), defaultdict(set)
    vae, options = loaded(family, "cuda"), StreamOptions(chunk=chunk)
    for frames in lengths:
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
            found[call.weight].add(call)
    assert {len(calls) for calls in found.values()} == {1}
    assert not device.faults


def test_tensors_that_a_device_cannot_hold_are_cut(play, monkeypatch):
    plain = loaded("wan2.1")
    latent = latent_for(plain, 2, 64, 64)
    video = joined(plain.decode_stream(latent))
    device = play("apple")
    monkeypatch.setattr(memory, "_METAL_BYTES", 1 << 20)
    vae, out = loaded("wan2.1", "mps"), torch.empty(video.shape)
    for _ in vae.decode_stream(latent, out=out):
        pass
    assert relative_error(out, video) <= 1e-5
    assert not device.faults
    with pytest.raises(ValueError, match="too many for a tensor on mps"):
        vae.decode(latent_for(vae, 20, 64, 64))


def test_frames_that_no_plan_makes_small_enough_are_refused_in_one_line(play, monkeypatch):
    device = play("apple")
    monkeypatch.setattr(memory, "_METAL_BYTES", 1 << 18)
    vae = loaded("seedvr2", "mps")  # never tiled
    plan = vae.plan(64, 64, encode=True)
    assert plan.peak_bytes < 1 << 40
    with pytest.raises(ValueError, match=r"^the frames are 64 x 64 .*large for a tensor on mps.*$"):
        vae.encode(pixels_for(vae, 5, 64))
    assert not device.calls


@pytest.mark.parametrize("name", ["mem_get_info", "memory_stats"])
def test_memory_that_a_driver_does_not_know_stops_nothing(name, play, monkeypatch):
    def fails(*_):
        raise RuntimeError("The device does not support querying the available free memory")

    play("intel")
    monkeypatch.setattr(torch.xpu, name, fails)
    vae = loaded("wan2.1", "xpu")
    assert vae.plan(64, 64).chunk >= 1
