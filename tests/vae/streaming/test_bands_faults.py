"""After a failure of a device the others go on; a stop ends the work of all."""

import contextlib
import functools
import gc
import re
import threading
import time
import weakref
from collections import Counter
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.tests.vae.families import STATES, joined, latent_for, random_frames
from fast_video_vae.tests.vae.streaming.failing_memory import FailingMemory
from fast_video_vae.tests.vae.streaming.test_bands import threads
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.layers.temporal_cache import TemporalCache, Workspace
from fast_video_vae.vae.streaming.bands.banded_executor import BandedExecutor
from fast_video_vae.vae.streaming.bands.member import Member
from fast_video_vae.vae.streaming.resume import _logger
from fast_video_vae.vae.streaming.session import VideoSession
from fast_video_vae.vae.streaming.tiled_executor import TiledDecode, TiledEncode

STEP = StreamOptions(1)
LATENTS, HEIGHT, WIDTH = 5, 16, 96
KEPT = (BandedExecutor, Member, TemporalCache, VideoSession, Workspace)
RUN_OUT = r"memory ran out \(CUDA out of memory. Tried to allocate .*\)"


@pytest.fixture
def vae():
    vae = load_vae(STATES["wan2.1"](), dtype=torch.float32)
    vae.devices = ["cpu"] * 3
    return vae


def stream_of(vae, task):
    latent, length = latent_for(vae, LATENTS, HEIGHT, WIDTH), vae.config.frames(LATENTS)
    if task == "out":
        return vae.decode_stream(latent, STEP, out=torch.zeros(1, 3, length, HEIGHT, WIDTH))
    if task in ("encode", "pieces of an encode"):
        video = random_frames(1, 3, length, HEIGHT, WIDTH)
        return vae.encode_stream(video if task == "encode" else iter(video.split(3, dim=2)), STEP)
    return vae.decode_stream(latent, STEP)


def run(vae, task):
    return joined(stream_of(vae, task))


def around(monkeypatch, do):
    """Let `do` call the work of each device on a chunk, by its number and its executor."""
    for route in (TiledDecode, TiledEncode):

        def run(self, *arguments, work=route.run):
            number = int(threading.current_thread().name.split("-")[3])
            return do(number, self, functools.partial(work, self, *arguments))

        monkeypatch.setattr(route, "run", run)


@pytest.fixture
def faults(monkeypatch):
    """What runs instead of the work of a device on a chunk, by their numbers; counted chunks."""
    instead, chunks = {}, Counter()

    def run(device, executor, work):
        chunks[device] += 1
        return instead.get((device, chunks[device] - 1), lambda _, do: do())(executor, work)

    around(monkeypatch, run)
    instead["chunks"] = chunks
    return instead


def held():
    return Counter(type(each) for each in gc.get_objects() if type(each) in KEPT)


@pytest.fixture
def memory():
    """What devices hold, which is free when the next run begins, without the garbage collector."""
    with FailingMemory():
        torch.zeros(1)  # imports TorchDynamo, which keeps the frames that do so
    gc.collect()
    gc.disable()
    found, before = SimpleNamespace(refs=[], lines=[]), held()

    def look(record):
        """Look at the memory between two runs, which one line of the log shows."""
        found.lines.append(record.getMessage())
        assert not threads()
        assert held() <= before
        assert not [each for each in found.refs if each() is not None]
        return False

    _logger.addFilter(look)
    yield found
    _logger.removeFilter(look)
    gc.enable()
    assert held() <= before


# The task, the failing devices and their chunk, before or after its work, the error and its line.
CASES = [
    ("encode", [1], 1, True, RuntimeError("b\n" + "a" * 200), "b " + "a" * 118),
    ("pieces of an encode", [0, 1], 3, False, ValueError(), "ValueError"),
    ("out", [0], 3, 1, None, RUN_OUT),  # an allocation of the device fails
    ("decode", [1], None, False, RuntimeError("no context"), "no context"),  # it cannot begin
]


@pytest.mark.parametrize(("task", "failing", "chunk", "late", "error", "text"), CASES)
def test_the_others_go_on_after_a_failure(
    vae, monkeypatch, faults, memory, task, failing, chunk, late, error, text
):
    make, lines = Member.__init__, []

    def begin(self, work, band, stopped):
        make(self, work, band, stopped)
        if band.number in failing and not lines:
            lines.append(band)
            raise error

    def fail(executor, work):
        activation = torch.zeros(10)
        memory.refs += map(weakref.ref, (activation, executor))
        if error is None:
            with FailingMemory(late):
                return work()
        if late:
            work()
        try:
            raise RuntimeError("the cause")
        except RuntimeError as cause:
            raise error from cause

    expected = run(load_vae(vae.state_dict(), dtype=torch.float32), task)
    faults["chunks"].clear()
    faults.update({(device, chunk): fail for device in failing})
    with monkeypatch.context() as patch:
        if chunk is None:
            patch.setattr(Member, "__init__", begin)
        actual = run(vae, task)
    assert torch.equal(actual, expected)
    work = "an encode" if "encode" in task else "a decode"
    frame = vae.config.frames(chunk) if chunk else 0
    (line,) = memory.lines
    left = (
        "cpu alone" if failing == [0] else "cpu, cpu" if 0 not in failing else "cpu( alone|, cpu)"
    )
    end = f" in {work} at frame {frame}; going on with {left}"
    assert re.fullmatch(f"Fast Video VAE: cpu failed: {text}{end}", line)
    faults["chunks"].clear()
    for device in failing:
        faults.pop((device, chunk))
    assert torch.equal(run(vae, task), expected)
    left_out = {0, 1, 2} - faults["chunks"].keys()
    assert left_out <= {*failing} - {0}
    assert left_out or 0 in failing
    vae.devices = ["cpu"] * 3
    assert torch.equal(run(vae, task), expected)
    assert faults["chunks"].keys() == {0, 1, 2}
    assert len(memory.lines) == 1


@pytest.mark.parametrize(
    ("error", "message", "is_first"),
    [
        (ValueError("broken"), "broken", False),
        (
            torch.OutOfMemoryError("no\nroom"),
            r"memory ran out .+ \(no room\); use .+",
            True,
        ),
    ],
)
def test_an_error_of_the_device_alone_is_its_own(vae, faults, caplog, error, message, is_first):
    """Also if it is that of several devices."""
    vae.devices = ["cpu"] * 2

    def fail(*_):
        if is_first or threading.current_thread() is threading.main_thread():
            raise error

    def gone(*_):
        raise RuntimeError("gone")

    faults[1, 2] = gone
    vae.decoder.layers()[4].register_forward_pre_hook(fail)
    with pytest.raises(type(error), match=f"^{message}$"):
        run(vae, "decode")
    (line,) = [each.getMessage() for each in caplog.records]
    assert ("gone" in line) != is_first
    assert not threads()


def test_a_failure_in_a_video_says_nothing_about_devices_that_are_chosen_meanwhile(vae):
    team = vae.team
    vae.devices = ["cpu"] * 2
    team.fail(1)
    assert vae.team.members(vae.device).keys() == {0, 1}
    assert team.members(vae.device).keys() == {0, 2}


def test_errors_of_the_callers_pieces_end_the_threads(vae):
    def pieces():
        yield from latent_for(vae, 3, HEIGHT, WIDTH).split(1, dim=2)
        assert threads()
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        joined(vae.decode_stream(pieces()))
    assert not threads()


@pytest.fixture
def slow(monkeypatch):
    """Let convolutions of the devices take so long that a chunk takes 10 seconds or more."""
    ended, forward = threading.Event(), CausalConv3d.forward

    def slowed(self, *arguments, **options):
        if not ended.is_set() and threading.current_thread() in threads():
            time.sleep(0.7)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(CausalConv3d, "forward", slowed)
    return ended


class StopError(BaseException):
    """As ComfyUI's InterruptProcessingException."""


@pytest.mark.parametrize(
    ("task", "ends", "stops"),
    [
        ("decode", {0: torch.OutOfMemoryError, 2: StopError}, True),
        ("encode", {2: ValueError}, False),
    ],
)
def test_an_error_or_a_stop_of_a_device_ends_the_others(vae, monkeypatch, slow, task, ends, stops):
    together = threading.Barrier(len(ends))

    def run_instead(device, _, work):
        if device in ends and not slow.is_set():
            together.wait(10)
            slow.set()
            raise ends[device]("broken")
        return work()

    around(monkeypatch, run_instead)
    start = time.perf_counter()
    with pytest.raises(StopError) if stops else contextlib.nullcontext():
        run(vae, task)
    # All threads end within two of the slow convolutions, more or less.
    assert time.perf_counter() - start < 5
    assert not threads()
    assert len(vae.team.members(vae.device)) == (3 if stops else 2)


def test_threads_see_the_context_of_the_caller(vae, monkeypatch):
    """Such as the backend that `use_backend` forces."""
    setting, seen = ContextVar("setting", default=0), []
    around(monkeypatch, lambda device, _, work: (work(), seen.append(setting.get()))[0])
    stream = stream_of(vae, "decode")
    for value in (1, 2):
        setting.set(value)
        next(stream)
    stream.close()
    assert sorted(seen) == [1, 1, 1, 2, 2, 2]
