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
from fast_video_vae.vae import model as model_module
from fast_video_vae.vae.background_writer import BackgroundWriter
from fast_video_vae.vae.streaming import output
from fast_video_vae.vae.streaming.session import VideoSession
from fast_video_vae.vae.streaming.tiled_executor import TiledDecode


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

    monkeypatch.setattr(model_module, "background_writer", new)
    return made


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert "fast-video-vae-writer" not in {thread.name for thread in threading.enumerate()}


def target_of(vae, latent, *, images):
    batch, channels, frames, height, width = vae.config.decoded_shape(latent.shape)
    if images:
        return torch.full((batch, frames, height, width, channels), 77.0)
    return torch.full((batch, channels, frames, height, width), 77.0)


def test_a_piece_is_complete_when_it_arrives(wan, writers, monkeypatch):
    """The next piece was computed meanwhile."""
    fill = output._fill

    def slow(frames, target):
        time.sleep(0.05)
        fill(frames, target)

    monkeypatch.setattr(output, "_fill", slow)
    latent = latent_for(wan, 4, 64, 64)
    images = target_of(wan, latent, images=True)
    for index, piece in enumerate(wan.decode_stream(latent, StreamOptions(1), images=images)):
        assert (piece <= 1).all()
        assert writers[0].queued > min(index + 1, 3) or index == 3


def test_latents_of_an_iterable_are_requested_after_the_frames_before(wan, writers):
    """The next latent may be made from them."""
    latent, order = latent_for(wan, 4, 64, 64), []
    images = target_of(wan, latent, images=True)

    def latents():
        for part in latent.split(1, dim=2):
            order.append("latent")
            yield part

    for piece in wan.decode_stream(latents(), images=images):
        assert (piece <= 1).all()
        order.append("frames")
    assert order == ["latent", "frames"] * 4


@pytest.mark.parametrize("given", [iter, lambda parts: torch.cat(parts, dim=2)])
def test_nothing_behind_the_wanted_frames_is_decoded(wan, writers, monkeypatch, given):
    latent = latent_for(wan, 4, 64, 64)
    images = torch.full((1, 4, 64, 64, 3), 77.0)
    parts = list(latent.split(1, dim=2))
    stream = wan.decode_stream(given(parts), StreamOptions(1), images=images, frames=range(1, 5))
    taken = []
    begin = VideoSession._begin
    monkeypatch.setattr(
        VideoSession, "_begin", lambda self, x: (taken.append(x), begin(self, x))[-1]
    )
    assert sum(piece.shape[1] for piece in stream) == 4
    assert len(taken) == 2
    assert (images <= 1).all()


def test_an_abandoned_stream_ends_its_thread(wan, writers):
    latent = latent_for(wan, 4, 64, 64)
    images = target_of(wan, latent, images=True)
    stream = wan.decode_stream(latent, StreamOptions(1), images=images)
    next(stream)
    stream.close()
    before = images.clone()
    time.sleep(0.02)
    assert torch.equal(images, before)


def test_an_error_of_the_thread_is_raised_in_the_stream(wan, writers, monkeypatch):
    def full(frames, target):
        raise OSError("no space")

    monkeypatch.setattr(output, "_fill", full)
    latent = latent_for(wan, 4, 64, 64)
    images = target_of(wan, latent, images=True)
    with pytest.raises(OSError, match="no space"):
        list(wan.decode_stream(latent, StreamOptions(1), images=images))


def test_frames_that_arrived_before_an_error_are_complete(wan, writers, monkeypatch):
    """So a decode can continue after the last piece that was yielded."""
    latent = latent_for(wan, 4, 64, 64)
    images = target_of(wan, latent, images=True)
    put = BackgroundWriter.put

    def failing(writer, *arguments, **options):
        if writer.queued == 3:
            raise torch.OutOfMemoryError("no memory")
        put(writer, *arguments, **options)

    monkeypatch.setattr(BackgroundWriter, "put", failing)
    arrived = []
    stream = wan.decode_stream(latent, StreamOptions(1), images=images)
    with pytest.raises(torch.OutOfMemoryError):
        arrived.extend(stream)
    assert arrived
    at = sum(piece.shape[1] for piece in arrived)
    monkeypatch.undo()
    rest = range(at, images.shape[1])
    for _ in wan.decode_stream(latent, StreamOptions(1), images=images[:, at:], frames=rest):
        pass
    expected = target_of(wan, latent, images=True)
    for _ in wan.decode_stream(latent, images=expected):
        pass
    torch.testing.assert_close(images, expected, rtol=1e-4, atol=1e-4)


class Loss:
    """Devices that are lost, by the name of their thread, and the copies that each has begun.

    As in CUDA, each later call for the device is an error, also for a copy that is complete.
    """

    def __init__(self, monkeypatch):
        self.lost, self.begun, self.limit = set(), {}, {}
        copy = BackgroundWriter._copy

        def begin(writer, *arguments):
            copy(writer, *arguments)
            name = threading.current_thread().name
            self.begun[name] = self.begun.get(name, 0) + 1
            return Copied(self, name, self.begun[name])

        monkeypatch.setattr(BackgroundWriter, "_copy", begin)

    def error(self, name):
        return RuntimeError(f"CUDA error: {name} fell off the bus")


class Copied:
    """The event after copy `number` of a device, which the host waits for."""

    def __init__(self, loss, name, number):
        self.loss, self.name, self.number = loss, name, number

    def synchronize(self):
        time.sleep(0.01)
        if self.number >= self.loss.limit.get(self.name, 99):
            self.loss.lost.add(self.name)
        if self.name in self.loss.lost:
            raise self.loss.error(self.name)


@pytest.fixture
def shared(wan, writers, steady):
    """A decode of three devices to memory of the host, and its result on one."""
    latent = latent_for(wan, 6, 32, 96)
    out = target_of(wan, latent, images=False)
    expected = wan.decode(latent, 1)
    wan.devices = ["cpu"] * 3
    return wan, latent, out, expected


@pytest.mark.parametrize("copy", [1, 5])
def test_a_device_that_is_lost_during_a_copy_is_left_out(shared, monkeypatch, caplog, copy):
    wan, latent, out, expected = shared
    loss = Loss(monkeypatch)
    loss.limit["fast-video-vae-1-cpu"] = copy
    for _ in wan.decode_stream(latent, StreamOptions(1), out=out):
        pass
    assert torch.equal(out, expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "fell off the bus" in line
    assert wan.team.crew.members(wan.device).keys() == {0, 2}


@pytest.mark.parametrize("chunk", [0, 4])
def test_a_device_that_is_lost_before_its_copies_end_is_left_out(shared, monkeypatch, chunk):
    """Its frames of earlier chunks may wait for the thread of the writer."""
    wan, latent, out, expected = shared
    loss, work, calls = Loss(monkeypatch), TiledDecode.fill, []

    def failing(self, *arguments):
        work(self, *arguments)
        name = threading.current_thread().name
        if name == "fast-video-vae-1-cpu":
            calls.append(name)
            if len(calls) == chunk + 1:
                loss.lost.add(name)
                raise loss.error(name)

    monkeypatch.setattr(TiledDecode, "fill", failing)
    for _ in wan.decode_stream(latent, StreamOptions(1), out=out):
        pass
    assert torch.equal(out, expected)


def test_the_first_device_that_is_lost_during_a_copy_ends_the_video(shared, monkeypatch, caplog):
    wan, latent, out, _ = shared
    Loss(monkeypatch).limit["fast-video-vae-0-cpu"] = 3
    with pytest.raises(RuntimeError, match="fell off the bus"):
        list(wan.decode_stream(latent, StreamOptions(1), out=out))
    assert not caplog.records
    assert len(wan.team.crew.members(wan.device)) == 3


def test_a_device_that_is_lost_during_a_copy_ends_a_video_on_one_device(wan, writers, monkeypatch):
    latent = latent_for(wan, 6, 32, 96)
    out = target_of(wan, latent, images=False)
    Loss(monkeypatch).limit[threading.current_thread().name] = 3
    with pytest.raises(RuntimeError, match="fell off the bus"):
        list(wan.decode_stream(latent, StreamOptions(1), out=out))


def test_only_frames_that_leave_a_device_are_written_in_the_background():
    there, cpu = torch.empty(1, device="meta"), torch.device("cpu")
    assert output.background_writer(cpu, torch.empty(1)) is None
    assert output.background_writer(there.device, there) is None
    assert output.background_writer(there.device, None) is None
    assert output.background_writer(there.device, torch.empty(1)) is not None
