"""Inputs and outputs of the VAE: shapes, dtypes, errors, statistics, and global switches."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import random_frames
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.streaming import precision
from fast_video_vae.vae.validation import check_finite


@pytest.fixture(scope="module")
def vae():
    return load_vae(random_state_dict(8), dtype=torch.float32)


def test_a_tensor_is_checked_when_the_stream_is_created(vae):
    with pytest.raises(ValueError, match="12 channels"):
        vae.decode_stream(torch.zeros(1, 12, 1, 2, 2))  # before the first piece is requested


def test_wrong_arguments_of_encode_and_decode_are_refused(vae):
    for run, channels in ((vae.decode, 16), (vae.encode, 3)):
        with pytest.raises(ValueError, match=r"is a list; expected a tensor \["):
            run([[0.0]])
        with pytest.raises(ValueError, match="12 channels; this VAE needs"):
            run(torch.zeros(1, 12, 1, 8, 8))
        with pytest.raises(ValueError, match="chunk is"):
            run(torch.zeros(1, channels, 1, 8, 8), chunk="all")


def test_dropped_frames_are_a_warning_of_the_callers_line(vae):
    frames = random_frames(1, 3, 7, 16, 16)
    for run in (vae.encode, lambda frames: list(vae.encode_stream(frames))):
        with pytest.warns(UserWarning, match="the last 2 frames were dropped") as found:
            run(frames)
        assert [each.filename for each in found] == [__file__]


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_inputs_of_any_float_dtype_are_cast(vae, dtype):
    latent, video = torch.randn(1, 16, 2, 1, 1).to(dtype), random_frames(1, 3, 5, 8, 8).to(dtype)
    assert vae.decode(latent).dtype == vae.encode(video).dtype == torch.float32
    assert torch.equal(vae.decode(latent), vae.decode(latent.float()))
    assert torch.equal(vae.encode(video), vae.encode(video.float()))


@pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last_3d, "every other frame"]
)
def test_the_layout_of_an_input_does_not_matter(vae, layout):
    latent = torch.randn(2, 16, 6, 2, 3)[:, :, ::2]
    if layout != "every other frame":
        latent = latent.contiguous(memory_format=layout)
    torch.testing.assert_close(vae.decode(latent), vae.decode(latent.clone()))


def test_normalize_uses_the_statistics_of_wan(vae):
    latent = torch.zeros(1, 16, 1, 1, 1)
    normal = vae.normalize(latent)
    assert normal[0, 0, 0, 0, 0].item() == pytest.approx(0.7571 / 2.8184)
    assert normal[0, 15, 0, 0, 0].item() == pytest.approx(0.2921 / 1.9160)
    latent = torch.randn(2, 16, 3, 2, 2)
    torch.testing.assert_close(vae.denormalize(vae.normalize(latent)), latent)


def test_float32_switches_are_set_during_the_computation_only(monkeypatch):
    seen, owner = [], SimpleNamespace(fp32_precision="tf32")
    monkeypatch.setattr(
        precision, "_switches", lambda _: [(owner, "fp32_precision", "ieee", ("ieee",))]
    )
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    vae.decoder.conv1.register_forward_hook(lambda *_: seen.append(owner.fp32_precision))
    for _ in vae.decode_stream(torch.zeros(1, 16, 3, 1, 1), StreamOptions(chunk=1)):
        assert owner.fp32_precision == "tf32"  # restored between two pieces
    assert set(seen) == {"ieee"}
    full = functools.partial(precision.full_float32, torch.device("cpu"))
    with pytest.raises(KeyError), full(), full():  # an error restores them too
        raise KeyError(owner.fp32_precision)
    assert owner.fp32_precision == "tf32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_finite_values_with_an_infinite_sum_are_accepted(dtype):
    largest = torch.full((1, 16, 3, 4, 4), torch.finfo(dtype).max, dtype=dtype)
    check_finite(largest, "latent")
    largest[0, 3, 1, 2, 2] = math.inf
    largest[0, 4, 1, 2, 2] = -math.inf
    with pytest.raises(ValueError, match="2 values that are NaN or infinite"):
        check_finite(largest, "latent")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_latents_of_eight_bits_are_decoded(dtype):
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    latent = torch.randn(1, 16, 2, 2, 2).to(dtype)
    assert torch.equal(vae.decode(latent), vae.decode(latent.float()))
    with pytest.raises(ValueError, match="128 values that are NaN or infinite"):
        vae.decode(torch.full((1, 16, 2, 2, 2), math.nan).to(dtype))
