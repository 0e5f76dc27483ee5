"""Pixels that a device converts and checks are those that the host would have converted.

Frames of 8 and 16 bits are their values in float.

The device is the CPU here, through the path of other devices.
"""

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import STATES, joined, random_frames
from fast_video_vae.tests.vae.streaming.fake_gpu import CUDA, FakeGPU
from fast_video_vae.vae import StreamOptions, load_vae, model
from fast_video_vae.vae.streaming import session, upload
from fast_video_vae.vae.streaming.upload import Upload, to_unit, uint16_as_int16


def pixels_of(dtype, layout, frames=5):
    """Pixels `[1, 3, T, 6, 10]` of a `dtype`, in one of the layouts that users have."""
    x = random_frames(1, 3, frames, 6, 10)
    if dtype == torch.int16:  # the bits of uint16
        x = ((x + 1) * 32767).int().to(torch.uint16).view(torch.int16)
    else:
        x = ((x + 1) * 127).to(dtype) if dtype == torch.uint8 else x.to(dtype)
    images = x.permute(0, 2, 3, 4, 1).contiguous()
    return {
        "dense": x,
        "images": images.movedim(-1, 1),  # as ComfyUI's IMAGE
        "every second frame": torch.cat([x, x], dim=2)[:, :, ::2],
    }[layout]


@pytest.fixture
def gpu(monkeypatch):
    with FakeGPU(monkeypatch) as gpu:
        yield gpu


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (torch.uint8, "dense"),
        (torch.int16, "images"),
        (torch.float32, "every second frame"),
    ],
)
def test_pixels_arrive_as_they_are(gpu, dtype, layout):
    """Converted after the upload: bytes over PCIe are those of the user's dtype."""
    given = Upload(CUDA, torch.bfloat16, None)
    sent = []
    given._staged = lambda x, staged=given._staged: sent.append(staged(x)) or sent[-1]
    for seed, (frames, mode) in enumerate([(1, False), (4, True), (4, False), (2, True)]):
        with torch.inference_mode(mode):
            pixels = pixels_of(dtype, layout, frames).roll(seed, 3)
        before = pixels.clone()
        x = given(pixels)
        unit = pixels.float() / 127.5 - 1 if dtype == torch.uint8 else pixels
        if dtype == torch.int16:
            unit = (pixels.view(torch.uint16).double() / 32767.5 - 1).float()
        assert torch.equal(x, unit.to(torch.bfloat16))
        assert x.is_contiguous(memory_format=torch.channels_last_3d)
        assert sent[-1].dtype == dtype
        assert torch.equal(pixels, before)
    given.check()
    assert gpu.pins == [pixels_of(dtype, "dense", frames).nbytes for frames in (1, 4)]
    assert gpu.blocking == {False}
    assert not gpu.races


@pytest.mark.parametrize("reason", ["refused", "too many"])
def test_pixels_arrive_without_pinned_memory(monkeypatch, caplog, reason):
    if reason == "too many":
        monkeypatch.setattr(upload, "_STAGED_BYTES", 100)
    pixels = pixels_of(torch.float32, "images")
    with FakeGPU(monkeypatch, refuses=True) as gpu:
        given = Upload(CUDA, torch.float32, None)
        for _ in range(3):
            assert torch.equal(given(pixels), pixels)
    assert not gpu.races
    assert gpu.blocking == {True}
    assert len(caplog.messages) == (reason == "refused")
    assert all("cannot be pinned" in line and "\n" not in line for line in caplog.messages)


class OfGPU(Upload):
    """The path of other devices than a CPU, whose values are looked at once, at the end."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._checks = True


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(session, "Upload", OfGPU)
    monkeypatch.setattr(model, "check_frames", lambda *_, **given: None)


@pytest.fixture
def wan():
    return load_vae(random_state_dict(8), dtype=torch.float32)


def test_a_range_is_converted_like_floats_before(wan):
    """As ComfyUI's `process_input`, which 8-bit pixels do not need."""
    unit = torch.rand(1, 3, 9, 32, 32)
    to_range = unit.mul(2).sub(1)
    found = joined(wan.encode_stream(unit, to_range=lambda x: x * 2 - 1))
    assert torch.equal(found, wan.encode(to_range))
    eight = (unit * 255).to(torch.uint8)
    assert torch.equal(joined(wan.encode_stream(eight, to_range=torch.neg)), wan.encode(eight))


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_values_that_are_not_finite_are_reported_once_for_the_clip(wan, device, bad):
    frames = random_frames(1, 3, 13, 32, 32)
    frames[0, 1, 2, 3, 4] = frames[0, 0, 12, 0, 0] = bad
    latents = []
    with pytest.raises(ValueError, match=r"^frames has 2 values that are NaN or infinite; exp"):
        latents.extend(wan.encode_stream(frames, StreamOptions(1)))
    assert len(latents) == 4
    with pytest.raises(ValueError, match="frames has 2 values"):
        wan.encode(frames)
    assert torch.isfinite(wan.encode(frames.nan_to_num(0, 0, 0))).all()


def test_bad_pixels_are_found_if_memory_runs_out_behind_the_upload(device, monkeypatch):
    """The next run may begin after them."""
    vae = load_vae(STATES["wan2.2"](), dtype=torch.float32)
    frames = random_frames(1, 3, 9, 64, 64)
    frames[0, 0, 6, 0, 0] = float("nan")
    fold, calls = model.fold_pixels, []

    def folded(x, patch):
        calls.append(x)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")
        return fold(x, patch)

    monkeypatch.setattr(model, "fold_pixels", folded)
    with pytest.raises(ValueError, match="frames has 1 values"):
        list(vae.encode_stream(frames, StreamOptions(1)))
    assert len(calls) == 3


def test_every_number_is_converted_within_half_a_rounding():
    frames = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(1, 1, 1, 256, 256)
    before = frames.clone()
    found = to_unit(uint16_as_int16(frames))
    assert found.dtype == torch.float32
    assert torch.equal(found, (frames.double() / 65535 * 2 - 1).float())  # the formula in float64
    assert torch.equal(uint16_as_int16(frames), uint16_as_int16(before))  # the pixels of the caller
