"""Devices that fail leave no memory behind, without the help of the garbage collector."""

import contextlib
import functools
import gc
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.vae.families import STATES, latent_for, random_frames
from fast_video_vae.tests.vae.streaming.test_bands_faults import around
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.layers.workspace import Workspace
from fast_video_vae.vae.streaming.bands.banded_executor import BandedDecode, BandedEncode
from fast_video_vae.vae.streaming.bands.member import Member
from fast_video_vae.vae.streaming.session import VideoSession

pytestmark = pytest.mark.usefixtures("steady")

KEPT = (BandedDecode, BandedEncode, Member, TemporalCache, VideoSession, Workspace)


@pytest.fixture
def vae():
    vae = load_vae(STATES["wan2.1"](), dtype=torch.float32)
    vae.devices = ["cpu"] * 3
    return vae


def run(vae, task, pieces=None, **options):
    """Run a video of four chunks, all or some, also if it fails; return the error as text."""
    if task == "decode":
        stream = vae.decode_stream(latent_for(vae, 4, 32, 96), StreamOptions(1, **options))
    else:
        stream = vae.encode_stream(random_frames(1, 3, 13, 32, 96), StreamOptions(1, **options))
    try:
        for _ in itertools.islice(stream, pieces):
            pass
    except Exception as error:
        return str(error)
    return ""


@contextlib.contextmanager
def nothing_is_kept():
    def held():
        return sorted(type(each).__name__ for each in gc.get_objects() if type(each) in KEPT)

    gc.collect()
    gc.disable()
    try:
        before = held()
        yield
        assert held() == before
    finally:
        gc.enable()


def allocate(kind):
    try:
        raise RuntimeError("the cause")
    except RuntimeError as cause:
        raise kind("the device is gone") from cause


@pytest.fixture
def failing(monkeypatch):
    """Let devices fail in their second chunk with `errors`, by number.

    `alive` says for each later chunk of another device whether their activations are there.
    """
    errors, alive, results, calls = {}, [], [], {}

    def fail(device, executor, work):
        calls[device] = calls.get(device, 0) + 1
        if device not in errors and calls[device] > 2:
            alive.extend(each() is not None for each in results)
        result = work()
        if device in errors and calls[device] == 2:
            activation = torch.zeros(10)
            results.append(weakref.ref(activation))
            executor.cache.attempt(functools.partial(allocate, errors[device]))
        return result

    around(monkeypatch, fail)
    return SimpleNamespace(errors=errors, alive=alive)


@each_value_once(task=["decode", "encode"], pieces=[None, 2])
def test_a_finished_or_dropped_stream_keeps_nothing(vae, task, pieces):
    with nothing_is_kept():
        assert run(vae, task, pieces) == ""


@each_value_once(task=["decode", "encode"], device=[0, 2])
def test_a_device_that_cannot_begin_keeps_nothing(vae, monkeypatch, task, device):
    make = Member.__init__

    def begin(self, number, *arguments, **options):
        if number == device:
            raise RuntimeError("no context")
        make(self, number, *arguments, **options)

    monkeypatch.setattr(Member, "__init__", begin)
    with nothing_is_kept():
        assert run(vae, task) == ("" if device else "no context")


@pytest.mark.parametrize("task", ["decode", "encode"])
def test_bands_that_cannot_begin_keep_nothing(vae, monkeypatch, task):
    begin = Member.start

    def start(self, *arguments, **options):
        begin(self, *arguments, **options)
        if self.number == 1:
            raise RuntimeError("no room")

    monkeypatch.setattr(Member, "start", start)
    with nothing_is_kept():
        assert run(vae, task) == "no room"


@pytest.mark.parametrize("task", ["decode", "encode"])
def test_the_work_of_a_device_that_failed_is_freed_before_the_others_repeat_it(vae, failing, task):
    failing.errors[1] = RuntimeError
    with nothing_is_kept():
        assert run(vae, task) == ""
    assert failing.alive
    assert not any(failing.alive)


@each_value_once(task=["decode", "encode"], kind=[RuntimeError, torch.OutOfMemoryError])
def test_an_error_of_the_first_device_keeps_nothing(vae, failing, task, kind):
    failing.errors[0] = kind
    with nothing_is_kept():
        assert "gone" in run(vae, task)


def test_an_error_of_the_callers_release_keeps_nothing(vae, failing):
    def release(device):
        raise KeyError("by the caller")

    failing.errors[1] = torch.OutOfMemoryError
    with nothing_is_kept():
        run(vae, "decode", release=release)
