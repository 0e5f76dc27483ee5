"""Frames that leave a device for the host in the background arrive whole, in order, and once.

The device is the CPU here, through the path of other devices.
"""

import gc
import threading
import time

import pytest
import torch

from fast_video_vae.tests.vae.families import STATES, latent_for
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.background_writer import BackgroundWriter
from fast_video_vae.vae.streaming import output
from fast_video_vae.vae.streaming import resume as resume_module


@pytest.fixture
def wan():
    return load_vae(STATES["wan2.1"](), dtype=torch.float32)


@pytest.fixture
def writers(monkeypatch):
    """Pieces for a target leave through these writers, on a CPU too."""
    made = []

    def new(device, target):
        if target is None:
            return None
        made.append(BackgroundWriter(output._fill, dtype=None))
        return made[-1]

    monkeypatch.setattr(resume_module, "background_writer", new)
    return made


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert "fast-video-vae-writer" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def latent(wan):
    return latent_for(wan, 4, 32, 32)


@pytest.fixture
def images():
    return torch.full((1, 13, 32, 32, 3), 77.0)


def test_a_piece_is_complete_when_it_arrives(wan, writers, latent, images, monkeypatch):
    """The next piece was computed meanwhile."""
    fill = output._fill

    def slow(frames, target):
        time.sleep(0.05)
        fill(frames, target)

    monkeypatch.setattr(output, "_fill", slow)
    for index, piece in enumerate(wan.decode_stream(latent, StreamOptions(1), images=images)):
        assert (piece <= 1).all()
        assert writers[0].queued > min(index + 1, 3) or index == 3


def test_nothing_behind_the_wanted_frames_is_decoded(wan, writers, latent):
    images = torch.full((1, 4, 32, 32, 3), 77.0)
    parts = iter(latent.split(1, dim=2))
    stream = wan.decode_stream(parts, StreamOptions(1), images=images, frames=range(1, 5))
    taken = []
    wan.decoder.layers()[0].register_forward_pre_hook(lambda *_: taken.append(1))
    assert sum(piece.shape[1] for piece in stream) == 4
    assert len(taken) == 2
    assert (images <= 1).all()


def test_an_abandoned_stream_ends_its_thread(wan, writers, latent, images):
    stream = wan.decode_stream(latent, StreamOptions(1), images=images)
    next(stream)
    stream.close()
    before = images.clone()
    time.sleep(0.02)
    assert torch.equal(images, before)


@pytest.mark.parametrize("devices", [1, 3])
def test_an_error_of_the_thread_is_raised_in_the_stream(
    wan, writers, latent, images, monkeypatch, devices
):
    """It is not that of a device."""

    def full(frames, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "_fill", full)
    wan.devices = ["cpu"] * devices * (devices > 1)
    with pytest.raises(OSError, match="No space left"):
        list(wan.decode_stream(latent, StreamOptions(1), images=images))
    assert devices == 1 or len(wan.team.members(wan.device)) == 3


def test_frames_on_their_way_arrive_before_a_video_restarts(
    wan, writers, latent, images, monkeypatch
):
    expected = images.clone()
    for _ in wan.decode_stream(latent, images=expected):
        pass
    put, latents = BackgroundWriter.put, []
    wan.decoder.layers()[0].register_forward_pre_hook(lambda *_: latents.append(1))

    def failing(writer, *arguments, **options):
        if len(writers) == 2 and writer.queued == 3:
            raise torch.OutOfMemoryError("no memory")
        put(writer, *arguments, **options)

    monkeypatch.setattr(BackgroundWriter, "put", failing)
    at = 0
    for piece in wan.decode_stream(latent, StreamOptions(1), images=images):
        end = at + piece.shape[1]
        torch.testing.assert_close(piece, expected[:, at:end], rtol=1e-4, atol=1e-4)
        at = end
    assert at == 13
    assert len(writers) == 3
    assert len(latents) == 4 + 4


def test_only_frames_that_leave_a_device_are_written_in_the_background():
    there, cpu = torch.empty(1, device="meta"), torch.device("cpu")
    assert output.background_writer(cpu, torch.empty(1)) is None
    assert output.background_writer(there.device, there) is None
    assert output.background_writer(there.device, None) is None
    assert output.background_writer(there.device, torch.empty(1)) is not None
