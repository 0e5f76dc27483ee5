"""A device that fails, or whose memory runs out, changes neither the result nor the others."""

import _thread
import contextlib
import functools
import logging
import signal
import threading
import time
from contextvars import ContextVar
from dataclasses import replace

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.vae.families import STATES, close, joined, latent_for, random_frames
from fast_video_vae.tests.vae.streaming.failing_memory import FailingMemory
from fast_video_vae.tests.vae.streaming.test_bands import threads
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.oom import ExhaustedError
from fast_video_vae.vae.planning.bands import BandPlanner
from fast_video_vae.vae.streaming.tiled_executor import TiledDecode, TiledEncode

LATENTS, HEIGHT, WIDTH = 7, 16, 96

pytestmark = pytest.mark.usefixtures("steady")


@pytest.fixture(scope="module")
def weights():
    return random_state_dict(8)


@pytest.fixture
def vae(weights):
    vae = load_vae(weights, dtype=torch.float32)
    vae.devices = ["cpu"] * 3
    return vae


@pytest.fixture(scope="module")
def expected(weights):
    vae = load_vae(weights, dtype=torch.float32)
    return {
        "decode": joined(vae.decode_stream(latent(), StreamOptions(1))),
        "encode": joined(vae.encode_stream(video(), StreamOptions(1))),
    }


def latent():
    return torch.randn(1, 16, LATENTS, 2, 12, generator=torch.Generator().manual_seed(1))


def video():
    return random_frames(1, 3, 4 * LATENTS - 3, HEIGHT, WIDTH)


def run(vae, task, source=None, **options):
    stream = vae.decode_stream if task == "decode" else vae.encode_stream
    given = latent() if task == "decode" else video()
    return joined(stream(given if source is None else source(given), StreamOptions(1, **options)))


def number():
    """The number of the device of this thread."""
    return int(threading.current_thread().name.split("-")[3])


def around(monkeypatch, do):
    """Let `do` call the work of each device on a chunk, by its number and its executor."""
    for route, name in ((TiledDecode, "fill"), (TiledEncode, "join")):
        work = getattr(route, name)

        def run(self, *arguments, work=work):
            return do(number(), self, functools.partial(work, self, *arguments))

        monkeypatch.setattr(route, name, run)


@pytest.fixture
def faults(monkeypatch):
    """Let devices fail at a chunk, by number: (chunk, before or after its work, error)."""
    plan, calls = {}, {}

    def run(device, _, work):
        calls[device] = calls.get(device, -1) + 1
        at, late, error = plan.get(device, (None, False, None))
        if calls[device] == at and not late:
            raise error
        result = work()
        if calls[device] == at:
            raise error
        return result

    around(monkeypatch, run)
    plan["calls"] = calls
    return plan


@each_value_once(chunk=[0, 1, 4, LATENTS - 1], late=[False, True], task=["decode", "encode"])
def test_the_others_do_the_work_of_a_device_that_fails(
    vae, expected, faults, caplog, task, late, chunk
):
    faults[1] = chunk, late, RuntimeError("the cable is loose\nsecond line")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(vae, task), expected[task])
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cpu failed" in line
    assert "the cable is loose second line" in line
    assert not threads()
    faults["calls"].clear()
    caplog.clear()
    assert torch.equal(run(vae, task), expected[task])
    assert sorted(faults["calls"]) == [0, 2]  # left out from here on
    assert not caplog.records


@pytest.mark.parametrize("task", ["decode", "encode"])
def test_pieces_of_an_iterable_are_repeated_too(vae, expected, faults, task):
    faults[2] = 4, True, RuntimeError("gone")

    def pieces(whole):
        """Each in memory that is used again for the next."""
        first = whole[:, :, :1].clone()
        yield first
        size = 1 if task == "decode" else 4
        memory = torch.empty_like(whole[:, :, :size])
        for at in range(1, whole.shape[2], size):
            memory.copy_(whole[:, :, at : at + size])
            yield memory
            memory.fill_(0.5)

    assert torch.equal(run(vae, task, pieces), expected[task])


@pytest.mark.parametrize(
    "chunks",
    [
        (2, 5),  # one after the other
        (3, 3),  # at once
        (3, 4),  # the second one in a chunk that it repeats
    ],
)
def test_two_devices_can_fail(vae, expected, faults, caplog, chunks):
    for device, chunk in enumerate(chunks, start=1):
        faults[device] = chunk, device == 2, RuntimeError("gone")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(vae, "decode"), expected["decode"])
    assert len(caplog.records) == 2
    faults["calls"].clear()
    assert torch.equal(run(vae, "encode"), expected["encode"])
    assert not faults["calls"]  # one device is left


@pytest.mark.parametrize("task", ["decode", "encode"])
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("the first one"), RuntimeError, "the first one"),
        (
            torch.OutOfMemoryError("Tried to allocate 20.00 MiB\nmore"),
            ExhaustedError,
            r"20\.00 MiB more were needed",
        ),
    ],
)
def test_an_error_of_the_first_device_is_raised(vae, faults, caplog, task, error, kind, message):
    faults[0] = 3, False, error
    with pytest.raises(kind, match=message):
        run(vae, task)
    assert not threads()
    assert not any("failed" in text for text in caplog.messages)
    assert vae.team.crew.members(vae.device).keys() == {0, 1, 2}


def test_a_range_of_frames_survives_a_failure(vae, expected, faults):
    faults[1] = 5, False, RuntimeError("gone")
    stream = vae.decode_stream(latent(), StreamOptions(1), frames=range(10, 23))
    assert torch.equal(joined(stream), expected["decode"][:, :, 10:23])


def test_a_static_end_survives_a_failure(vae, faults):
    clip = random_frames(1, 3, 1, HEIGHT, WIDTH).repeat(1, 1, 81, 1, 1)
    clip[:, :, :7] = random_frames(1, 3, 7, HEIGHT, WIDTH)
    vae.devices = []
    encoded = joined(vae.encode_stream(clip, StreamOptions(1)))
    for at in (3, 9, 15):
        vae.devices = ["cpu"] * 2
        faults["calls"].clear()
        faults[1] = at, False, RuntimeError("gone")
        close(joined(vae.encode_stream(clip, StreamOptions(1))), encoded)


def test_pictures_survive_a_failure(faults):
    vae = load_vae(STATES["qwen-image-2.1"](), dtype=torch.float32)
    pictures = latent_for(vae, 3, 64, 128)
    decoded = vae.decode(pictures)
    vae.devices = ["cpu"] * 2
    faults[1] = 1, True, RuntimeError("gone")
    assert torch.equal(vae.decode(pictures), decoded)


@pytest.fixture
def failing(monkeypatch):
    """Let allocations of devices fail, by number: a `FailingMemory` each."""
    memories = {}

    def run(device, _, work):
        with memories.get(device, contextlib.nullcontext()):
            return work()

    around(monkeypatch, run)
    return memories


@each_value_once(first=[1, 7, 60], device=[0, 1], task=["decode", "encode"])
def test_a_device_whose_memory_runs_out_runs_its_band_in_tiles(
    vae, expected, failing, caplog, monkeypatch, task, device, first
):
    """Frames as small as these need no less memory in tiles, so the plan is a stand-in."""
    memory = failing[device] = FailingMemory(first)
    tiles = {}

    def halved(self, bands, number):
        (band,) = [each for each in bands.members if each.number == number]
        (rows, (start, stop)) = band.tiles[0]
        middle = start + 1
        smaller = replace(band, tiles=((rows, (start, middle)), (rows, (middle, stop))))
        members = [smaller if each is band else each for each in bands.members]
        return replace(bands, members=tuple(members))

    def noted(device, executor, work):
        tiles.setdefault(device, []).append(len(executor.tiles))
        return work()

    monkeypatch.setattr(BandPlanner, "smaller", halved)
    around(monkeypatch, noted)
    with caplog.at_level(logging.WARNING):
        close(run(vae, task), expected[task])
    assert memory.failed == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert "memory ran out" in line
    assert "on cpu" in line
    assert tiles[device][0] == 1
    assert tiles[device][-1] > 1
    assert {count for n, each in tiles.items() if n != device for count in each} == {1}


def test_a_device_whose_memory_stays_short_is_left_out(vae, expected, failing, caplog):
    failing[2] = FailingMemory(40, 10_000)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(vae, "decode"), expected["decode"])
    assert any("failed" in each.getMessage() for each in caplog.records)
    assert vae.team.crew.members(vae.device).keys() == {0, 1}


def test_memory_of_the_caller_is_released_by_one_thread_at_a_time(vae, expected, failing):
    inside, most = [], []

    def release(device):
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.01)
        inside.pop()

    for device in range(3):
        failing[device] = FailingMemory(5, every=40)
    close(run(vae, "decode", release=release), expected["decode"])
    assert most
    assert set(most) == {1}


def test_an_error_of_the_callers_release_is_raised(vae, failing, caplog):
    class StoppedError(Exception):
        pass

    def release(device):
        raise StoppedError("by the user")

    failing[1] = FailingMemory(20)
    with pytest.raises(StoppedError):
        run(vae, "decode", release=release)
    assert not threads()
    assert not caplog.records
    assert len(vae.team.crew.members(vae.device)) == 3


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_errors_of_the_callers_pieces_end_the_threads(vae, kind):
    def pieces():
        yield from latent()[:, :, :3].split(1, dim=2)
        assert threads()
        raise kind("stop")

    with pytest.raises(kind, match="stop"):
        joined(vae.decode_stream(pieces()))
    assert not threads()


def test_a_signal_ends_the_threads_within_a_layer(vae, monkeypatch):
    """It comes while the caller waits for a device that would take a minute."""
    begun, work = threading.Event(), TiledDecode.fill

    def endless(self, x, chunk, attempt):
        if number() == 1:
            begun.set()
            for _ in range(6000):
                attempt(lambda: time.sleep(0.01))
        work(self, x, chunk, attempt)

    def interrupt():
        begun.wait(10)
        _thread.interrupt_main()

    monkeypatch.setattr(TiledDecode, "fill", endless)
    thread, start = threading.Thread(target=interrupt), time.perf_counter()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job may ignore it
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run(vae, "decode")
    finally:
        signal.signal(signal.SIGINT, previous)
    thread.join()
    assert time.perf_counter() - start < 5
    assert not threads()


class StopError(BaseException):
    """As ComfyUI's InterruptProcessingException."""


@pytest.mark.parametrize("task", ["decode", "encode"])
@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        ({0: torch.OutOfMemoryError("short"), 2: StopError()}, StopError),  # not the first's error
        ({1: RuntimeError("gone"), 2: StopError()}, StopError),
        ({1: StopError()}, StopError),
        ({0: ValueError("broken")}, ValueError),  # the others cannot go on without the first
    ],
)
def test_an_error_that_ends_the_video_ends_the_other_devices(vae, monkeypatch, task, ends, kind):
    """Devices without an error would take a minute."""
    together = threading.Barrier(len(ends))

    def run_instead(device, executor, _):
        if device in ends:
            together.wait(10)
            raise ends[device]
        for _ in range(6000):
            executor.cache.attempt(lambda: time.sleep(0.01))

    around(monkeypatch, run_instead)
    start = time.perf_counter()
    with pytest.raises(kind):
        run(vae, task)
    assert time.perf_counter() - start < 5
    assert not threads()
    assert len(vae.team.crew.members(vae.device)) == 3


def test_threads_see_the_context_of_the_caller(vae, monkeypatch):
    """Such as the backend that `use_backend` forces."""
    setting, seen = ContextVar("setting", default=0), []
    around(monkeypatch, lambda device, _, work: (work(), seen.append(setting.get())))
    stream = vae.decode_stream(latent(), StreamOptions(1))
    for value in (1, 2):
        setting.set(value)
        next(stream)
    stream.close()
    assert sorted(seen) == [1, 1, 1, 2, 2, 2]
