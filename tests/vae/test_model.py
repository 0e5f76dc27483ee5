"""Inputs and outputs of the VAE: shapes, dtypes, statistics, and errors that say what is wrong."""

import functools
import math
import re

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict, refused
from fast_video_vae.tests.vae.families import STATES, latent_for, random_frames
from fast_video_vae.vae import StreamOptions, load_vae, validation
from fast_video_vae.vae.validation import check_finite


@functools.cache
def vae_of(family):
    return load_vae(STATES[family](), dtype=torch.float32)


@pytest.fixture
def vae():
    return vae_of("wan2.1")


# An option of a stream, a wrong value, and the error.
WRONG = [
    *(
        ("chunk", chunk, f"chunk is {chunk!r}; expected a number of latents, -1 for all, or None")
        for chunk in [0, -2, 1.5, True]
    ),
    *(
        ("tile", tile, f"tile is {tile!r}; expected height and width in pixels, or None")
        for tile in [(0, 64), (16, -8), (1.5, 16), (64,), (8, 8, 8), 64]
    ),
    ("dtype", "float32", "dtype is 'float32'; expected a float dtype such as torch.float32"),
    ("dtype", torch.int32, "dtype is torch.int32; expected a float dtype such as torch.float32"),
]


def test_wrong_options_are_refused():
    for name, value, message in WRONG:
        with refused(re.escape(message)):
            StreamOptions(**{name: value})


# An argument of a decode of three latents, a wrong value, and the error.
WRONG_OF_DECODE = [
    *(
        ("frames", frames, f"frames are {frames!r}; expected a range ")
        for frames in [range(0), range(5, 2), range(-3, 1), range(0, 1, 2), (0, 1)]
    ),
    ("frames", range(8, 10), "frames are range(8, 10); expected a range within 0 to 8"),
    ("out", "frames", "out is a str; expected a tensor"),
    ("images", 0, "images is a int; expected a tensor"),
    ("out", torch.empty(1, 3, 9, 16, 8), "out has shape [1, 3, 9, 16, 8]; expected [1, 3, 9, 8, 8"),
    ("images", torch.empty(1, 9, 8, 8, 4), "has shape [1, 9, 8, 8, 4]; expected [1, 9, 8, 8, 3]"),
    ("images", torch.empty(1, 8, 8, 8, 3), "has shape [1, 8, 8, 8, 3]; expected [1, 9, 8, 8, 3]"),
]


def test_wrong_arguments_of_a_decode_are_refused_before_the_first_piece(vae):
    latent = torch.randn(1, 16, 3, 1, 1)
    for name, value, message in WRONG_OF_DECODE:
        with refused(re.escape(message)):
            vae.decode_stream(latent, **{name: value})
    target = torch.empty(1)
    with refused("both out and images are given"):
        vae.decode_stream(latent, out=target, images=target)


def test_a_range_behind_the_end_of_an_iterable_is_an_error_at_its_end(vae):
    latents = iter(torch.randn(1, 16, 3, 1, 1).split(1, dim=2))
    stream = vae.decode_stream(latents, frames=range(8, 10))
    with refused(r"frames are range\(8, 10\)"):
        list(stream)


def test_frame_sizes_must_be_multiples_of_the_compression(vae):
    for height, width in ((8, 12), (12, 8)):
        with refused(rf"frames are {height} x {width} \(H x W\); expected multiples of 8"):
            vae.encode_stream(torch.zeros(1, 3, 5, height, width))


# A change that makes a video wrong, and the error.
WRONG_VIDEOS = {
    "no batch": (lambda x: x[:0], "is empty, [0, "),
    "no width": (lambda x: x[..., :0], "is empty, ["),
    "one channel": (lambda x: x[:, :1], "has 1 channels; this VAE needs "),
    "a picture": (lambda x: x[:, :, 0], "has 4 dimensions, ["),
    "integers": (lambda x: x.long(), "int64; expected a float dtype"),
    "bits": (lambda x: x > 0, "bool; expected a float dtype"),
    "an array": (lambda x: x.numpy(), " is a ndarray; expected a tensor ["),
    "a number": (lambda _: 5, " is a int; expected a tensor ["),
    "nothing": (lambda _: iter([]), "; expected at least one"),
    "another size": (lambda x: iter([x, torch.cat([x, x], dim=3)]), "a piece has shape ["),
    "another batch": (lambda x: [x, torch.cat([x, x])], "a piece has shape ["),
}


@pytest.mark.parametrize("kind", WRONG_VIDEOS)
def test_wrong_videos_are_refused(vae, kind):
    change, message = WRONG_VIDEOS[kind]
    latent, frames = torch.randn(1, 16, 2, 2, 2), random_frames(1, 3, 5, 16, 16)
    for stream, whole, given in (
        (vae.decode_stream, vae.decode, latent),
        (vae.encode_stream, vae.encode, frames),
    ):
        with refused(re.escape(message)):
            list(stream(change(given)))
        if kind in ("nothing", "another size", "another batch"):
            continue
        with refused(re.escape(message)):
            whole(change(given))
        if kind != "an array":  # an iterable, too
            with refused(re.escape(message)):
                stream(change(given))  # before the first piece is requested


def test_what_requires_a_gradient_is_refused(vae):
    latent, frames = torch.zeros(1, 16, 2, 1, 1), torch.zeros(1, 3, 5, 8, 8)
    runs = (vae.decode, vae.decode_stream, latent), (vae.encode, vae.encode_stream, frames)
    for (run, stream, given), name in zip(runs, ("latent", "frames"), strict=True):
        leaf = given.clone().requires_grad_()
        message = f"^{name} requires a gradient; expected one without, such as {name}.detach"
        for whole in (run, stream):
            with pytest.raises(ValueError, match=message):
                whole(leaf)
        pieces = stream(iter([given[:, :, :1], leaf[:, :, 1:]]))
        next(pieces)
        with pytest.raises(ValueError, match=message):
            next(pieces)
        with torch.no_grad():
            assert torch.equal(run(leaf), run(given))


def test_weights_that_require_a_gradient_compute_without_one():
    vae, latent = load_vae(random_state_dict(8), dtype=torch.float32), torch.randn(1, 16, 2, 1, 1)
    expected = vae.decode(latent)
    frames = vae.requires_grad_().decode(latent)
    assert torch.equal(frames, expected)
    assert not any(each.requires_grad for each in (frames, vae.encode(frames)))


def test_normalize_uses_the_statistics(vae):
    latent = torch.randn(2, 16, 3, 2, 2)
    normal = vae.normalize(latent)
    assert normal[1, 4, 2, 1, 0].item() == pytest.approx((latent[1, 4, 2, 1, 0] + 0.1745) / 1.2196)
    torch.testing.assert_close(vae.denormalize(normal), latent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_values_with_an_infinite_sum_are_accepted(dtype):
    largest = torch.full((1, 16, 3, 4, 4), torch.finfo(dtype).max, dtype=dtype)
    check_finite(largest, "latent")
    largest[0, 3, 1, 2, 2] = math.inf
    largest[0, 4, 1, 2, 2] = -math.inf
    with pytest.raises(ValueError, match="2 values that are NaN or infinite"):
        check_finite(largest, "latent")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_inputs_of_any_float_dtype_are_cast(vae, dtype):
    latent, video = torch.randn(1, 16, 2, 1, 1).to(dtype), random_frames(1, 3, 5, 8, 8).to(dtype)
    assert torch.equal(vae.decode(latent), vae.decode(latent.float()))
    if dtype.itemsize > 1:
        assert torch.equal(vae.encode(video), vae.encode(video.float()))
    with pytest.raises(ValueError, match="32 values that are NaN or infinite"):
        vae.decode(torch.full((1, 16, 2, 1, 1), math.nan).to(dtype))


# Errors of a video that no VAE can take: where it is wrong, and who made it.
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


@pytest.mark.parametrize("family", ["wan2.1", "seedvr2"])
def test_a_latent_is_refused_with_its_first_bad_frame(family):
    vae = vae_of(family)
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


@pytest.mark.parametrize("family", ["wan2.1", "seedvr2"])
def test_frames_are_refused_with_the_first_bad_one(family):
    vae = vae_of(family)
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
